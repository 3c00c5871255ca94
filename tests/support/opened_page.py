"""``memlog open`` as a person uses it: the page that it shows, in a real browser."""

import contextlib
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from urllib.parse import urlsplit

from playwright.sync_api import Page


@contextlib.contextmanager
def opened(path: Path, cache: Path) -> Iterator[str]:
    """Run ``memlog open`` on a machine without a screen, and yield the address that it prints."""
    hidden = ("DISPLAY", "WAYLAND_DISPLAY", "BROWSER", "MEMLOG_DIR")
    environment = {name: value for name, value in os.environ.items() if name not in hidden}
    process = subprocess.Popen(
        [sys.executable, "-m", "memlog", "open", str(path)],
        env={**environment, "XDG_CACHE_HOME": str(cache)},
        stdout=subprocess.PIPE,
        text=True,
    )
    assert process.stdout is not None
    try:
        lines = [process.stdout.readline().strip() for _ in range(4)]
        assert lines[0] == f"{path.name} is shown at"
        port = urlsplit(lines[1]).port
        assert lines[3].startswith(f"ssh -N -L {port}:127.0.0.1:{port} ")
        yield lines[1]
        process.send_signal(signal.SIGINT)
        rest = process.stdout.read()
        assert process.wait(timeout=60) == 0
        assert rest.splitlines()[-1] == "memlog: no longer shown"
    finally:
        process.kill()
        process.wait()
        process.stdout.close()


def shown_rows(page: Page, awaited: str = "[activations]") -> dict[str, str]:
    """The figures in the page's sandwich table, by the frame's name."""
    page.get_by_text("Sandwich").click()
    page.get_by_text(awaited).wait_for()
    rows = [row.inner_text().split("\t") for row in page.locator("table tr").all()]
    return {row[-1].strip(): " ".join(row[:-1]) for row in rows}

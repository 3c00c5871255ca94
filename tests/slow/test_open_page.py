"""``memlog open`` as a person sees it: a flame graph in speedscope's own page, in a real browser."""

import contextlib
import gzip
import json
import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from urllib.parse import urlsplit

import pytest
from playwright.sync_api import Page
from support.browser import SOFTWARE_GL, chromium
from support.flamegraphs import document

pytestmark = [
    pytest.mark.slow,
    pytest.mark.integration,
    pytest.mark.skipif(shutil.which("npm") is None, reason="npm fetches speedscope: not installed"),
]

ODD_NAME = "step 100 #1 & 50%.json.gz"


@contextlib.contextmanager
def opened(path: Path, cache: Path) -> Iterator[str]:
    """``memlog open`` on a machine without a screen; yields the address that it prints."""
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


def shown_rows(page: Page) -> dict[str, str]:
    """The sandwich table: the frames' figures by name."""
    page.get_by_text("Sandwich").click()
    page.get_by_text("[activations]").wait_for()
    rows = [row.inner_text().split("\t") for row in page.locator("table tr").all()]
    return {row[-1].strip(): " ".join(row[:-1]) for row in rows}


def test_a_flame_graph_is_on_the_page_and_nothing_leaves_the_machine(tmp_path: Path) -> None:
    path = tmp_path / ODD_NAME
    path.write_bytes(gzip.compress(json.dumps(document()).encode()))
    asked: list[str] = []
    errors: list[str] = []
    with opened(path, tmp_path / "cache") as url, chromium(*SOFTWARE_GL) as page:
        page.on("request", lambda request: asked.append(request.url))
        page.on("pageerror", lambda error: errors.append(str(error)))
        page.on("dialog", lambda dialog: errors.append(dialog.message))
        page.goto(url)
        page.get_by_text(f"{ODD_NAME} (1/2)").wait_for()
        assert page.title() == f"{ODD_NAME} - speedscope"
        page.screenshot(path=tmp_path / "chart.png")
        rows = shown_rows(page)
        page.screenshot(path=tmp_path / "sandwich.png")
    assert errors == []
    assert "4.00 MB" in rows["[activations]"]
    assert "3.00 MB" in rows["[parameters]"]
    assert "6.00 MB" in rows["encoder.mlp"]
    assert {urlsplit(address).hostname for address in asked if not local(address)} == {"127.0.0.1"}


def local(address: str) -> bool:
    """Whether an address names no server at all."""
    return address.startswith(("data:", "blob:"))

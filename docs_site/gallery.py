"""The gallery: runs the programs of some pages, and keeps their reports with pictures of them.

``python -m docs_site.gallery [NAME …]`` writes ``NAME.html``, ``NAME-light.png`` and ``NAME-dark.png`` into
``docs/gallery/``.
"""

from __future__ import annotations

import argparse
import os
import re
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

from playwright.sync_api import Browser, sync_playwright

DOCS = Path(__file__).resolve().parents[1] / "docs"
GALLERY = DOCS / "gallery"
PAGES = {
    "healthy": "get-started/pytorch.md",
    "leak": "how-to/find-a-leak.md",
    "layers": "how-to/fit-a-larger-batch.md",
    "out-of-memory": "how-to/read-an-out-of-memory-report.md",
}
"""Pages whose ``train.py`` is run, by the report's name."""
DEMO = "demo"
_PROGRAM = re.compile(r'^```python title="train.py"\n(.*?)^```$', re.MULTILINE | re.DOTALL)
_WIDTH, _HEIGHT = 1280, 860


def make_report(name: str, folder: Path) -> None:
    """Run a program in an empty folder, and keep its run's report."""
    command = [sys.executable, "train.py"]
    if name == DEMO:
        command = [sys.executable, "-m", "memlog", "demo", "--backend", "local"]
    else:
        page = (DOCS / PAGES[name]).read_text(encoding="utf-8")
        (folder / "train.py").write_text(_PROGRAM.findall(page)[0], encoding="utf-8")
    own = {key: value for key, value in os.environ.items() if not key.startswith("MEMLOG_")}
    # The program that runs out of memory fails, as it should.
    subprocess.run(command, cwd=folder, env=own, check=name != "out-of-memory")  # noqa: S603 - the page's own
    report = [
        sys.executable,
        "-m",
        "memlog",
        "report",
        "latest",
        "-o",
        str(GALLERY / f"{name}.html"),
    ]
    subprocess.run(report, cwd=folder, env=own, check=True)  # noqa: S603 - memlog


def take_pictures(name: str, browser: Browser) -> None:
    """Take the top of a report, in both colour schemes."""
    for scheme in ("light", "dark"):
        page = browser.new_page(
            viewport={"width": _WIDTH, "height": _HEIGHT},
            color_scheme="light" if scheme == "light" else "dark",
        )
        page.goto((GALLERY / f"{name}.html").as_uri())
        page.wait_for_load_state("networkidle")
        page.screenshot(path=GALLERY / f"{name}-{scheme}.png")
        page.close()


def main() -> None:
    """Make the reports that are named, or all."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("names", nargs="*", choices=[*PAGES, DEMO, []], metavar="NAME")
    names = parser.parse_args().names or [*PAGES, DEMO]
    for name in names:
        with tempfile.TemporaryDirectory(prefix="memlog-gallery-") as folder:
            make_report(name, Path(folder))
    chromium = shutil.which("chromium") or shutil.which("google-chrome")
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=chromium, args=["--no-sandbox"])
        for name in names:
            take_pictures(name, browser)
        browser.close()


if __name__ == "__main__":
    main()

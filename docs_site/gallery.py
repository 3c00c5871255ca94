"""Make the gallery's reports of the demo and of the programs on some pages.

``make gallery`` runs the programs and writes ``docs/gallery/NAME.html``.
"""

from __future__ import annotations

import argparse
import os
import re
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import NamedTuple

DOCS = Path(__file__).resolve().parents[1] / "docs"
_PROGRAM = re.compile(r'^```python title="train.py"\n(.*?)^```$', re.MULTILINE | re.DOTALL)


class Report(NamedTuple):
    """A report of the gallery."""

    page: str | None
    """Page whose ``train.py`` is run, or ``None`` for the demo."""
    arguments: tuple[str, ...] = ("",)
    """Arguments of the program, one text for each run of it. The report covers all runs."""
    fails: bool = False
    """True if the program ends with an error, as it should."""


REPORTS = {
    "demo": Report(None),
    "larger-batch": Report("how-to/fit-a-larger-batch.md"),
    "out-of-memory": Report("how-to/read-an-out-of-memory-report.md", fails=True),
    "comparison": Report("how-to/gate-memory-in-ci.md", ("1024", "2048")),
}


def make(name: str, folder: Path) -> None:
    """Run a report's program in an empty folder, and write the report."""
    report = REPORTS[name]
    own = {key: value for key, value in os.environ.items() if not key.startswith("MEMLOG_")}
    # The report shows the command. It must look as a user types it, without this machine's folders.
    own["PATH"] = f"{Path(sys.executable).parent}{os.pathsep}{own['PATH']}"
    memlog = ["python", "-m", "memlog"]
    command = [*memlog, "demo", "--backend", "local"]
    if report.page is not None:
        text = (DOCS / report.page).read_text(encoding="utf-8")
        (folder / "train.py").write_text(_PROGRAM.findall(text)[0], encoding="utf-8")
        command = ["python", "train.py"]
    for arguments in report.arguments:
        words = [*command, *arguments.split()]
        subprocess.run(words, cwd=folder, env=own, check=not report.fails)  # noqa: S603 - of the page
    runs = sorted(folder.glob("memlog_runs/*/"), key=lambda run: run.stat().st_ctime)
    output = DOCS / "gallery" / f"{name}.html"
    words = [*memlog, "report", *(run.name for run in runs), "-o", str(output)]
    subprocess.run(words, cwd=folder, env=own, check=True)  # noqa: S603 - memlog


def main() -> None:
    """Make the reports that are named on the command line; all reports if none is named."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("names", nargs="*", metavar="NAME", help=", ".join(REPORTS))
    for name in parser.parse_args().names or REPORTS:
        with tempfile.TemporaryDirectory(prefix="memlog-gallery-") as folder:
            make(name, Path(folder))


if __name__ == "__main__":
    main()

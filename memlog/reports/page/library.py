"""Files that are written into the page: uPlot, the page's own script, and the style."""

from __future__ import annotations

import base64
import hashlib
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

from memlog._internal.npm_package import UPLOT, FetchError

_STATIC = Path(__file__).with_name("static")
_SCRIPTS = ("common.js", "marks.js", "chart.js", "icicle.js", "main.js")
_STYLES = ("page.css", "figures.css")


class Library(NamedTuple):
    script: str
    style: str
    missing: str | None
    """Reason why charts can't be zoomed, and the remedy; ``None`` if charts can be zoomed."""

    @property
    def policy(self) -> str:
        """Content-Security-Policy that allows this script and this style, but no loading and no sending."""
        return (
            f"default-src 'none'; script-src '{_digest(self.script)}'; style-src '{_digest(self.style)}'; "
            "base-uri 'none'; form-action 'none'"
        )


def load_library(announce: Callable[[str], object] | None = None) -> Library:
    """Read the page's scripts and styles.

    If uPlot is missing and ``announce`` is not ``None``, this function calls ``announce`` with one line of
    text, and then fetches uPlot. Without uPlot, the charts are drawings that can't be zoomed.
    """
    folder = None
    missing = (
        "this memlog was installed without uPlot: `memlog report` fetches it once, through npm"
    )
    try:
        folder = UPLOT.find(announce)
    except FetchError as error:
        missing = f"{error}: {error.remedy}"
    except OSError as error:
        why = error.strerror or error
        missing = f"{why}: set XDG_CACHE_HOME to a folder that can be written"
    own = [(_STATIC / name).read_text("utf-8") for name in _SCRIPTS]
    styles = [(_STATIC / name).read_text("utf-8") for name in _STYLES]
    if folder is not None:
        own.insert(0, (folder / UPLOT.needed).read_text("utf-8"))
        styles.insert(0, (folder / "uPlot.min.css").read_text("utf-8"))
    return Library("\n".join(own), "\n".join(styles), missing if folder is None else None)


def _digest(text: str) -> str:
    # A browser hashes the text as it is in the page, where lines end with "\n".
    return f"sha256-{base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()}"

"""A run's or a trace's report in a notebook."""

from __future__ import annotations

from html import escape
from pathlib import Path

from memlog.journal import RunDirectory
from memlog.reports import page
from memlog.trace.records import RecordedTrace

_HEIGHT = 640
"""Height of the frame, in pixels."""


def run_html(directory: Path) -> str:
    """Return the report of a run in a frame. The run can still be running."""
    run = RunDirectory(directory)
    return _framed(page.html(run), f"memlog: run {run.id}")


def trace_html(recording: RecordedTrace) -> str:
    return _framed(page.html(recording), "memlog: trace")


def _framed(html: str, title: str) -> str:
    """Return a page in a frame of its own. The frame separates the page's style from the notebook's style."""
    return (
        f'<iframe title="{escape(title)}" sandbox="allow-scripts" '
        f'style="width:100%;height:{_HEIGHT}px;border:0" srcdoc="{escape(html)}"></iframe>'
    )

"""A run's or a trace's report in a notebook."""

from __future__ import annotations

import importlib
from html import escape
from pathlib import Path

from memlog._internal.units import format_bytes
from memlog.journal import RunDirectory
from memlog.reports.schema import Summary
from memlog.reports.summary import summarize
from memlog.trace.display import result_html
from memlog.trace.records import RecordedTrace

_HEIGHT = 640
"""Pixels of the frame."""


def run_html(directory: Path) -> str:
    """Return the report of a run, which may still be running, in a frame."""
    run = RunDirectory(directory)
    return _framed(_report(run) or _table(summarize(run)), f"memlog: run {run.id}")


def trace_html(recording: RecordedTrace) -> str:
    """Return the report of a trace in a frame."""
    page = _report(recording)
    return result_html(recording.result) if page is None else _framed(page, "memlog: trace")


def _framed(page: str, title: str) -> str:
    """Return a page in a frame of its own, so that it and the notebook don't change each other's style."""
    return (
        f'<iframe title="{escape(title)}" sandbox="allow-scripts" '
        f'style="width:100%;height:{_HEIGHT}px;border:0" srcdoc="{escape(page)}"></iframe>'
    )


def _report(what: RunDirectory | RecordedTrace) -> str | None:
    try:
        page = importlib.import_module("memlog.reports.page")
    except ModuleNotFoundError:
        return None
    made: str = page.html(what)
    return made


def _table(summary: Summary) -> str:
    """Return a page with the verdict and the peaks."""
    rows = "".join(
        f"<tr><td>{escape(kind)}</td><td>{format_bytes(peak.bytes)}</td>"
        f"<td>{'' if peak.step is None else f'step {peak.step:,}'}</td></tr>"
        for kind, peak in summary.peaks.items()
    )
    return (
        '<!doctype html><html lang="en"><head><meta charset="utf-8">'
        f"<title>{escape(summary.run.id)}</title><style>body{{font:14px sans-serif;margin:0;"
        "color-scheme:light dark}td,th{text-align:left;padding:2px 16px 2px 0}</style></head><body>"
        f"<p><b>{escape(summary.verdict)}</b></p><p>run {escape(summary.run.id)}, {summary.status}, "
        f"{summary.steps:,} steps</p><table><tr><th>memory</th><th>peak</th><th>at</th></tr>{rows}</table>"
        "</body></html>"
    )

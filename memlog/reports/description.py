"""Describe a run on a tracker's page, in Markdown: the verdict, a small table, and how to see the rest."""

from __future__ import annotations

import re
import shlex
from collections.abc import Iterator, Mapping
from contextlib import suppress

from memlog._internal.terminal import format_bytes, format_duration
from memlog.errors import TraceNotFoundError
from memlog.events import ALLOCATED, HOST_RSS, REPORT_FILE, TREE, End, Trace
from memlog.facts.levels import Peak
from memlog.findings import beyond
from memlog.journal import RunDirectory
from memlog.reports.schema import HealthFacts, Summary
from memlog.reports.summary import summarize
from memlog.reports.worst_step import read_worst_step

_SHOWN = 4
"""Maximum number of categories, and of layers, in a row of the table."""
_MOST_PEAKS = 10
_MAX_TEXT = 300
"""Maximum characters of a table cell. Names come from the user's program and can be long."""


def description(
    run: RunDirectory, backend: str, stored: str | None = None, end: End | None = None
) -> str:
    """Return the description of a run that is over, short enough for a tracker's text field.

    ``stored`` is the tracker's id of the run, for the command that fetches the run's files. It is ``None`` if
    the tracker stores no files. ``end`` is the run's end, if the journal has none yet.
    """
    summary, traced = summarize(run, end=end), None
    with suppress(TraceNotFoundError):
        traced = read_worst_step(run).event
    remedy = summary.findings[0].remedy if summary.findings else None
    rows = [f"| {_cell(name)} | {_cell(text)} |" for name, text in _rows(summary, traced)]
    return "\n".join(
        [
            f"**{_one_line(summary.verdict)}**",
            "",
            *([f"What to do: {_one_line(remedy)}", ""] if remedy else []),
            "| memory | by memlog |",
            "| --- | --- |",
            *rows,
            "",
            f"The rest is on {_one_line(summary.run.host or 'the machine that trained')}:",
            "",
            "```",
            *_commands(run, has_graph=traced is not None),
            "```",
            *([] if stored is None else ["", *_files(summary, backend, stored)]),
        ]
    )


def _files(summary: Summary, backend: str, stored: str) -> Iterator[str]:
    if any(file.name == REPORT_FILE for file in summary.artifacts):
        yield f"`{REPORT_FILE}`, among this run's artifacts, shows it in charts."
    elsewhere = _memlog("pull", f"{shlex.quote(stored)} --backend {backend} -o out")
    yield f"On another machine, `{elsewhere}` fetches its files."


def _rows(summary: Summary, traced: Trace | None) -> Iterator[tuple[str, str]]:
    steps = f"{summary.steps:,} steps" if summary.steps else "no steps"
    if summary.run.duration_s is not None:
        steps += f" in {format_duration(summary.run.duration_s)}"
    yield "Run", f"{summary.status}, {steps}"
    yield from _peaks(summary)
    if traced is not None and traced.peak is not None:
        where = "A step that did not end" if traced.step is None else f"Step {traced.step:,}"
        peak = f"{'' if traced.exact else 'at least '}{format_bytes(traced.peak)} in tensors"
        yield f"{where}, traced", f"{peak}: {_sizes(traced.at_peak)}"
        layers = {layer.path: layer.at_peak for layer in traced.layers if layer.at_peak}
        if layers:
            yield "Its largest layers", _sizes(layers)
    alerts = beyond(summary.verdict, summary.alerts)
    if alerts:
        more = f", and {len(alerts) - 1:,} more" if len(alerts) > 1 else ""
        yield "Alerts", f"{alerts[0].title}{more}"
    yield "memlog itself", _health(summary.health)


def _peaks(summary: Summary) -> Iterator[tuple[str, str]]:
    names = {HOST_RSS: "Peak of the process", TREE: "Peak with its child processes"}
    host = summary.peaks[HOST_RSS].bytes or 0
    known = [
        (kind, peak)
        for kind, peak in summary.peaks.items()
        # Without child processes, the tree's size (PSS) is below the process's (RSS) and adds no information.
        if peak.bytes is not None and not (kind == TREE and peak.bytes <= host)
    ]
    for kind, peak in known[:_MOST_PEAKS]:
        device = kind.removesuffix(ALLOCATED)
        facts = summary.run.devices.get(device)
        if kind in names:
            yield names[kind], _peak(peak, None)
        elif facts is not None:
            yield f"Peak on {device}", _peak(peak, facts.capacity_bytes)


def _peak(peak: Peak, capacity: int | None) -> str:
    of = "" if capacity is None else f" of {format_bytes(capacity)}"
    return ", ".join(filter(None, [f"{format_bytes(peak.bytes)}{of}", peak.at_step]))


def _sizes(sizes: Mapping[str, int]) -> str:
    ordered = sorted(sizes.items(), key=lambda item: -item[1])
    named = [f"{name} {format_bytes(size)}" for name, size in ordered[:_SHOWN]]
    return ", ".join(named) + (", …" if len(ordered) > _SHOWN else "")


def _health(health: HealthFacts) -> str:
    cost = health.overhead_ms_per_step
    parts = [] if cost is None else [f"{cost:.3g} ms a step"]
    for counts, verb in ((health.dropped, "lost"), (health.faults, "failed")):
        if counts:
            parts.append(f"{verb}: {', '.join(f'{name} {n:,}' for name, n in counts.items())}")
    if not (health.dropped or health.faults):
        parts.append("nothing was lost")
    return "; ".join(parts)


def _commands(run: RunDirectory, *, has_graph: bool) -> Iterator[str]:
    """Yield commands that work in every working directory of the machine that trained."""
    where = f"{run.id} --dir {shlex.quote(str(run.path.absolute().parent))}"
    yield _memlog("show", where)
    if has_graph:
        yield f"{_memlog('open', where)}    # the traced step's layers, as a flame graph"
    yield _memlog("report", f"{where} -o report.html")


def _memlog(command: str, arguments: str) -> str:
    return f"memlog {command} {arguments}"


def _cell(text: str) -> str:
    cut = text if len(text) <= _MAX_TEXT else f"{text[: _MAX_TEXT - 1]}…"
    return re.sub(r"[|*<]", r"\\\g<0>", _one_line(cut))


def _one_line(text: str) -> str:
    return " ".join(text.split())

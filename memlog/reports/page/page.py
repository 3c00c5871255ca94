"""Assembly of the page: from a run, from a traced step, from two runs."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any
from xml.etree.ElementTree import Element

import msgspec
from msgspec.structs import replace

from memlog._internal.units import format_bytes
from memlog._version import __version__
from memlog.errors import TraceNotFoundError
from memlog.events import End, Trace
from memlog.facts.levels import peak_kind
from memlog.journal import RunDirectory
from memlog.reports.page import comparison, drawings, layer_sections, run_sections, sections
from memlog.reports.page.facts import RunSeries
from memlog.reports.page.layer_sections import ShownStep, step_title
from memlog.reports.page.layers import Node, event_tree, layer_rows, layer_tree
from memlog.reports.page.library import Library, load_library
from memlog.reports.page.markup import Child, el, write
from memlog.reports.page.ranks import find_ranks, rank_chart
from memlog.reports.page.run_reader import RunReader
from memlog.reports.page.series import Chart
from memlog.reports.schema import Summary
from memlog.reports.step_ranking import advise_with, not_the_largest
from memlog.reports.worst_step import read_worst_step
from memlog.trace import encoding
from memlog.trace.predict import advise
from memlog.trace.records import RecordedTrace

Announce = Callable[[str], object]

_MOST_EVENTS = 200_000
"""Maximum number of events of a traced step. If the step has more, no savings are predicted, because the
prediction would take more than about a second."""


def html(
    what: RunDirectory | RunReader | RecordedTrace,
    *,
    announce: Announce | None = None,
    end: End | None = None,
) -> str:
    """Return the report as one HTML document, for ``memlog report`` and for notebooks.

    A notebook shows the document in ``<iframe sandbox="allow-scripts" srcdoc="…">``. The document needs no
    storage and no other file, and sends nothing.

    Args:
        what: A run (it can still be running), a reader that has read a part of the run's journal, or a traced
            step.
        announce: Function that is called with one line of text before uPlot is fetched. uPlot is fetched
            only if this installation lacks it. ``None``: uPlot is never fetched. Without uPlot, the charts
            can't be zoomed.
        end: End of a user's run in a tracker, for a report that this run gets; ``None``: the end in the
            journal, if any.
    """
    library = load_library(announce)
    if isinstance(what, RecordedTrace):
        return _trace_page(what, library)
    reader = RunReader(what) if isinstance(what, RunDirectory) else what
    return _run_page(reader, library, end)


def comparison_html(
    first: RunDirectory, second: RunDirectory, *, announce: Announce | None = None
) -> str:
    """Return a report that compares two runs, as one HTML document."""
    library = load_library(announce)
    compared = comparison.compared(first, second)
    return _document(
        f"{compared.names[1]} compared with {compared.names[0]}",
        [el("strong", "Two runs compared")],
        comparison.parts(compared, library.missing),
        _data(compared.series),
        library,
    )


def _run_page(reader: RunReader, library: Library, end: End | None) -> str:
    summary = reader.summary(end)
    series = reader.series.series()
    step = _traced_step(reader)
    series = replace(series, charts=[_with_peak(chart, summary) for chart in series.charts])
    ranks, all_ranks = find_ranks(reader.run, summary)
    if ranks:
        series = replace(series, charts=[*series.charts, rank_chart(ranks)])
    parts = [
        el("div", sections.verdict(summary), class_="headline"),
        sections.tiles(sections.key_figures(summary, series)),
        sections.bad_end(reader.run),
        sections.memory(series, library.missing),
        sections.traced(series.traces, summary.traced),
        None if step is None else layer_sections.icicle(step),
        None if step is None else layer_sections.largest(step),
        run_sections.longest_batch(summary),
        run_sections.phases(summary),
        run_sections.failures(summary),
        run_sections.ranks(ranks, all_ranks),
        run_sections.alerts(summary),
        run_sections.provenance(summary),
        run_sections.health(summary),
    ]
    about: list[Child] = [
        el("strong", ", ".join(summary.names) or f"run {summary.run.id}"),
        el("span", summary.status, class_=f"pill {summary.status}"),
        el("span", f"run {summary.run.id}") if summary.names else None,
        el("span", sections.moment(summary.run.begun)),
    ]
    title = ", ".join(summary.names) or summary.run.id
    return _document(title, about, parts, _data(series, step), library)


def _with_peak(chart: Chart, summary: Summary) -> Chart:
    peak = summary.peaks.get(peak_kind(chart.id))
    if peak is None or peak.bytes is None or peak.step is None or not summary.steps:
        return chart
    return replace(chart, peak=(peak.step, peak.bytes))


def _trace_page(trace: RecordedTrace, library: Library) -> str:
    model = trace.model or "a block of code"
    result = trace.result
    predicted = advise(trace) if _is_cheap(trace) else None
    step = ShownStep(model, layer_tree(trace), layer_rows(trace), predicted, None)
    held = ", ".join(
        f"{name} {format_bytes(size)}"
        for name, size in sorted(result.categories.items(), key=lambda item: -item[1])[:3]
    )
    headline = f"{model} needs {format_bytes(result.peak)} at its peak on {result.device}: {held}."
    tiles = [
        ("Peak in tensors", format_bytes(result.peak), result.exactness),
        ("Before", format_bytes(result.before), "live when the trace began"),
        ("After", format_bytes(result.end), "live when it ended"),
        ("Duration", f"{result.duration_ms:,.1f} ms", "with tracing"),
    ]
    parts = [
        el("div", el("h1", headline, class_="verdict"), class_="headline"),
        sections.tiles(tiles),
        layer_sections.icicle(step) if step.tree.size else None,
        layer_sections.largest(step),
    ]
    about: list[Child] = [el("strong", model), el("span", f"{result.engine} engine")]
    return _document(model, about, parts, _data(RunSeries("step", [], [], 0, []), step), library)


def _traced_step(reader: RunReader) -> ShownStep | None:
    try:
        event, trace = read_worst_step(reader.run)
    except TraceNotFoundError:
        return _step_of_journal(reader.totals.facts.traces.worst)
    predicted, remark = None, None
    if _is_cheap(trace):
        predicted, standing = advise_with(reader.ranking, event, trace)
        remark = not_the_largest(standing, event.step, predicted)
    return ShownStep(
        step_title(event, trace.model), layer_tree(trace), layer_rows(trace), predicted, remark
    )


def _step_of_journal(worst: Trace | None) -> ShownStep | None:
    if worst is None or (tree := event_tree(worst)) is None:
        return None
    return ShownStep(step_title(worst, ""), tree, [], None, None)


def _is_cheap(trace: RecordedTrace) -> bool:
    return len(trace.events) <= _MOST_EVENTS * encoding.EVENT_BYTES


def _data(series: RunSeries, step: ShownStep | None = None) -> bytes:
    document = {
        "axis": series.axis,
        "charts": series.charts,
        "marks": series.marks,
        "tree": None if step is None else _packed(step),
    }
    return msgspec.json.encode(document)


def _packed(step: ShownStep) -> dict[str, Any]:
    """Return a step's title and layers. Layers are arrays, because JSON objects are three times as long."""

    def pack(node: Node) -> list[Any]:
        return [
            node.name,
            node.size,
            drawings.color(node.category) if node.category else "",
            node.kind,
            [pack(child) for child in node.children],
        ]

    return {"title": step.title, "root": pack(step.tree)}


def _document(
    title: str,
    about: list[Child],
    parts: Iterable[Element | None],
    data: bytes,
    library: Library,
) -> str:
    head = el(
        "head",
        el("meta", charset="utf-8"),
        el("meta", http_equiv="Content-Security-Policy", content=library.policy),
        el("meta", name="viewport", content="width=device-width, initial-scale=1"),
        el("meta", name="color-scheme", content="light dark"),
        el("meta", name="referrer", content="no-referrer"),
        el("title", f"{title}: memory report"),
        _raw("style", library.style),
    )
    body = el(
        "body",
        el("a", "Skip to the verdict", href="#main", class_="skip"),
        el("header", el("span", "memlog", class_="brand"), about),
        el("main", parts, id="main"),
        el("footer", f"Made by memlog {__version__}. This page loads nothing and sends nothing."),
        # Without a "<", the JSON can't end the element around it.
        _raw("script", data.decode().replace("<", "\\u003c"), type="application/json", id="data"),
        _raw("script", library.script),
    )
    return write(el("html", head, body, lang="en"))


def _raw(name: str, text: str, /, **attributes: str) -> Element:
    """Return a ``script`` or ``style`` element. Its text is written to the page without escaping."""
    made = el(name, **attributes)
    made.text = text
    return made

"""Assembly of pages: from a run, from a traced step, from two runs, with the files written into them."""

from __future__ import annotations

import base64
import hashlib
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any, NamedTuple
from xml.etree.ElementTree import Element

import msgspec
from msgspec.structs import replace

from memlog._internal.npm_package import UPLOT, FetchError
from memlog._internal.terminal import format_bytes
from memlog._version import __version__
from memlog.errors import TraceNotFoundError
from memlog.events import End, Trace
from memlog.facts.levels import peak_kind
from memlog.journal import RunDirectory
from memlog.reports.compare import Compared, Comparison, compare
from memlog.reports.figures import STEP_TIME, TRACE_PEAK, run_figures
from memlog.reports.page import drawings, layers, sections
from memlog.reports.page.drawings import (
    Chart,
    Child,
    TableRow,
    el,
    prose,
    side_by_side,
    table,
    write,
)
from memlog.reports.page.facts import RunReader, RunSeries, run_series
from memlog.reports.page.layers import (
    Node,
    ShownStep,
    event_tree,
    layer_rows,
    layer_tree,
    step_title,
)
from memlog.reports.page.sections import find_ranks, rank_chart
from memlog.reports.schema import Summary
from memlog.reports.summary import summarize
from memlog.reports.worst_step import advise_with, not_the_largest, read_worst_step
from memlog.trace import encoding
from memlog.trace.predict import advise
from memlog.trace.records import RecordedTrace

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
    compared = compared_runs(first, second)
    return _document(
        f"{compared.names[1]} compared with {compared.names[0]}",
        [el("strong", "Two runs compared")],
        comparison_parts(compared, library.missing),
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
        None if step is None else layers.icicle(step),
        None if step is None else layers.largest(step),
        sections.longest_batch(summary),
        sections.phases(summary),
        sections.failures(summary),
        sections.ranks(ranks, all_ranks),
        sections.alerts(summary),
        sections.provenance(summary),
        sections.health(summary),
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
        layers.icicle(step) if step.tree.size else None,
        layers.largest(step),
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


_LAYERS = 20
_SAME_PERCENT = 1.0
"""If two peaks differ by less than this many percent, they count as the same."""


class TwoRuns(NamedTuple):
    names: tuple[str, str]
    summaries: tuple[Summary, Summary]
    figures: Comparison
    series: RunSeries
    """Charts with a line for each run."""


def compared_runs(first: RunDirectory, second: RunDirectory) -> TwoRuns:
    runs = (first, second)
    before, after = (summarize(run) for run in runs)
    names = _names(before, after)
    series = [run_series(run) for run in runs]
    return TwoRuns(
        names,
        (before, after),
        compare([run_figures(run) for run in runs]),
        RunSeries(series[0].axis, _overlaid(series, names), [], 0, []),
    )


def comparison_parts(runs: TwoRuns, missing: str | None) -> list[Element | None]:
    """Return the sections of the page.

    ``missing`` is the reason why charts can't be zoomed; ``None`` if charts can be zoomed.
    """
    return [
        el("div", el("h1", _headline(runs), class_="verdict"), _verdicts(runs), class_="headline"),
        sections.memory(runs.series, missing),
        _figures(runs),
        _categories(runs),
        _layers(runs),
        *(
            sections.provenance(summary, f"origin-{summary.run.id}", f"Where {name} came from")
            for name, summary in zip(runs.names, runs.summaries, strict=True)
        ),
    ]


def _headline(runs: TwoRuns) -> str:
    """Return one sentence that compares the runs by the first figure of `_HEADLINES` that both runs have."""
    first, second = runs.names
    for name, label in _HEADLINES.items():
        figure = runs.figures.figures.get(name)
        if figure is None or (change := figure.changes_percent[1]) is None:
            continue
        before, after = (value or 0.0 for value in figure.values)
        if abs(change) < _SAME_PERCENT:
            return f"{second} has the same {label} as {first}: {format_bytes(after)}."
        more = "higher" if after > before else "lower"
        return (
            f"The {label} of {second} is {format_bytes(abs(after - before))} ({abs(change):.1f} %) {more} "
            f"than that of {first}: {format_bytes(after)} against {format_bytes(before)}."
        )
    return f"{second} and {first} have no memory figure in common."


_HEADLINES: Mapping[str, str] = {
    "device.peak": "peak on the accelerator",
    TRACE_PEAK: "peak in tensors",
    "host.rss": "process's peak",
}


def _verdicts(runs: TwoRuns) -> Element:
    return el(
        "dl",
        [
            el("div", el("dt", name), el("dd", *prose(summary.verdict)))
            for name, summary in zip(runs.names, runs.summaries, strict=True)
        ],
        class_="facts",
    )


def _overlaid(series: list[RunSeries], names: tuple[str, str]) -> list[Chart]:
    """Return one chart for each kind of memory that both runs have, with a line for each run."""
    if series[0].axis != series[1].axis:
        return []
    by_id = [{chart.id: chart for chart in run.charts} for run in series]
    return [
        _both((chart, by_id[1][name]), names)
        for name, chart in by_id[0].items()
        if name in by_id[1]
    ]


def _both(charts: tuple[Chart, Chart], names: tuple[str, str]) -> Chart:
    limit = charts[0].limit if charts[0].limit == charts[1].limit else None
    by_run = {f"run {name}": chart for name, chart in zip(names, charts, strict=True)}
    return side_by_side(charts[0].id, charts[0].title, by_run, limit)


def _figures(runs: TwoRuns) -> Element:
    known = {
        name: figure
        for name, figure in runs.figures.figures.items()
        if set(figure.values) != {None} and (name == STEP_TIME or figure.unit != "ms")
    }
    notes: list[Child] = [el("p", note, class_="note") for note in runs.figures.notes]
    return sections.section(
        "figures", "Side by side", _table("Figures", "figure", runs, known), *notes
    )


def _categories(runs: TwoRuns) -> Element | None:
    rows = runs.figures.categories
    if not _both_traced(runs):
        return None
    bars = [
        (name, {category: int(row.values[at] or 0) for category, row in rows.items()})
        for at, name in enumerate(runs.names)
    ]
    drawn = drawings.stacked_bars(bars, "Memory at the traced peak of both runs, by category")
    return sections.section(
        "categories", "What the memory is, at the traced peak",
        el("figure", drawn, drawings.legend(rows)),
        _table("Categories", "category", runs, rows),
    )  # fmt: skip


def _both_traced(runs: TwoRuns) -> bool:
    """Return True if a step of each run was traced."""
    rows = runs.figures.categories.values()
    return all(any(row.values[at] for row in rows) for at in range(len(runs.names)))


def _layers(runs: TwoRuns) -> Element | None:
    rows = runs.figures.layers
    if not rows or not _both_traced(runs):
        return None
    by_change = sorted(rows.items(), key=lambda item: -abs(_difference(item[1]) or 0))
    shown = dict(by_change[:_LAYERS])
    return sections.section(
        "layers", "Layers with the largest differences", _table("Layers", "layer", runs, shown)
    )


def _table(caption: str, heading: str, runs: TwoRuns, rows: Mapping[str, Compared]) -> Element:
    cells: list[TableRow] = []
    for name, row in rows.items():
        difference, change = _difference(row), row.changes_percent[1]
        tone = None if not difference else "more" if difference > 0 else "less"
        cells.append(
            [
                el("code", name) if heading != "category" else name,
                *(_value(row, value) for value in row.values),
                el("span", _signed(row, difference), class_=tone),
                "" if change is None else f"{change:+.1f} %",
            ]
        )
    headings = [heading, *runs.names, "difference", "change"]
    return table(caption, headings, cells, numbers=(1, 2, 3, 4))


def _difference(row: Compared) -> float | None:
    before, after = row.values
    return None if before is None or after is None else after - before


def _value(row: Compared, value: float | None) -> str:
    if value is None:
        return "unknown"
    if row.unit == "bytes":
        return format_bytes(value)
    return f"{value:,.2f} ms" if row.unit == "ms" else f"{value:.3g}"


def _signed(row: Compared, difference: float | None) -> str:
    if difference is None:
        return ""
    sign = "+" if difference > 0 else "\N{MINUS SIGN}" if difference < 0 else ""
    return sign + _value(row, abs(difference))


def _names(first: Summary, second: Summary) -> tuple[str, str]:
    first_name, second_name = first.run.name or first.run.id, second.run.name or second.run.id
    if first_name == second_name:
        return f"{first_name} ({first.run.id})", f"{second_name} ({second.run.id})"
    return first_name, second_name

"""Page that compares two runs: charts with a line for each run, and tables of categories and layers."""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple
from xml.etree.ElementTree import Element

from memlog._internal.terminal import format_bytes
from memlog.journal import RunDirectory
from memlog.reports.compare import STEP_TIME, TRACE_PEAK, Compared, Comparison, compare, run_figures
from memlog.reports.page import drawings, sections
from memlog.reports.page.drawings import Chart, Child, TableRow, el, prose, side_by_side, table
from memlog.reports.page.facts import RunSeries, run_series
from memlog.reports.schema import Summary
from memlog.reports.summary import summarize

_LAYERS = 20
_SAME_PERCENT = 1.0
"""If two peaks differ by less than this many percent, they count as the same."""


class TwoRuns(NamedTuple):
    names: tuple[str, str]
    summaries: tuple[Summary, Summary]
    figures: Comparison
    series: RunSeries
    """Charts with a line for each run."""


def compared(first: RunDirectory, second: RunDirectory) -> TwoRuns:
    runs = (first, second)
    one, other = (summarize(run) for run in runs)
    names = _names(one, other)
    series = [run_series(run) for run in runs]
    return TwoRuns(
        names,
        (one, other),
        compare([run_figures(run) for run in runs]),
        RunSeries(series[0].axis, _overlaid(series, names), [], 0, []),
    )


def parts(runs: TwoRuns, missing: str | None) -> list[Element | None]:
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
    for name, what in _HEADLINES.items():
        figure = runs.figures.figures.get(name)
        if figure is None or (change := figure.changes_percent[1]) is None:
            continue
        before, after = (value or 0.0 for value in figure.values)
        if abs(change) < _SAME_PERCENT:
            return f"{second} has the same {what} as {first}: {format_bytes(after)}."
        more = "higher" if after > before else "lower"
        return (
            f"The {what} of {second} is {format_bytes(abs(after - before))} ({abs(change):.1f} %) {more} "
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
    by_id = [{chart.id: chart for chart in one.charts} for one in series]
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
    one, other = first.run.name or first.run.id, second.run.name or second.run.id
    if one == other:
        return f"{one} ({first.run.id})", f"{other} ({second.run.id})"
    return one, other

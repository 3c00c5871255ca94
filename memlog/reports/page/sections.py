"""Sections of the page about one run, top to bottom."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from itertools import chain, islice, zip_longest
from xml.etree.ElementTree import Element

import msgspec

from memlog._internal.safe_files import read_plain
from memlog._internal.terminal import format_bytes, format_duration
from memlog.events import POSTMORTEM_FILE, Ranks, Trace
from memlog.facts.levels import UNKNOWN, Peak, peak_kind
from memlog.journal import RunDirectory
from memlog.ranks.registration import ranks_of
from memlog.reports.accumulator import known_peak
from memlog.reports.page import drawings
from memlog.reports.page.drawings import (
    Chart,
    Child,
    TableRow,
    el,
    prose,
    rendered,
    side_by_side,
    table,
)
from memlog.reports.page.facts import UNLISTED, RunSeries, run_series
from memlog.reports.postmortem import survived
from memlog.reports.schema import Delivery, FindingFacts, Summary, TracedFacts
from memlog.reports.summary import summarize
from memlog.sink import WEBHOOK

_TABLE_ROWS = 20
_HELPS = "\n## What would help\n"
_MOST_TEXT = 256 * 1024
LISTED = 100
"""Maximum number of rows of each list: of alerts, of phases, or of marks."""
_TRACED_ROWS = 60


def section(name: str, title: str, *content: Child | list[Child]) -> Element:
    heading = el("h2", title, id=name)
    return el("section", heading, *content, aria_labelledby=name, class_=f"part {name}")


def verdict(summary: Summary) -> list[Child]:
    """Return the verdict as the page's headline, with the remedy and the evidence."""
    finding = summary.findings[0] if summary.findings else None
    tone = "good" if summary.outcome in ("steady", "too few steps") else ""
    if finding is not None or summary.status in ("failed", "killed"):
        tone = "bad"
    headline, rest = _first_sentence(summary.verdict)
    parts: list[Child] = [el("h1", *prose(headline), class_=f"verdict {tone}".strip())]
    if rest:
        parts.append(el("p", *prose(rest), class_="lead"))
    if finding is not None and finding.remedy:
        parts.append(el("p", el("strong", "What to do: "), *prose(finding.remedy), class_="remedy"))
    if finding is not None:
        lines = _evidence_lines(finding) if finding.evidence else el("p", "None was recorded.")
        evidence = el("summary", f"Evidence (confidence: {finding.confidence})")
        parts.append(el("details", evidence, lines))
    parts += [_further(other) for other in summary.findings[1:]]
    return parts


def _first_sentence(text: str) -> tuple[str, str]:
    match = re.search(r"(?<=[.])\s+(?=[A-Z`])", text)
    return (text, "") if match is None else (text[: match.start()], text[match.end() :])


def _further(finding: FindingFacts) -> Element:
    remedy = None
    if finding.remedy:
        remedy = el("p", el("strong", "What to do: "), *prose(finding.remedy))
    title = el("summary", "Also: ", *prose(finding.title))
    return el("details", title, remedy, _evidence_lines(finding))


def _evidence_lines(finding: FindingFacts) -> Element:
    return el("ul", [el("li", *prose(line)) for line in finding.evidence])


def tiles(pairs: Sequence[tuple[str, str, str]]) -> Element:
    """Return an element with the key figures. Each figure has a name, a value and a remark."""
    return el(
        "dl",
        [
            el("div", el("dt", name), el("dd", value), el("dd", remark, class_="remark"))
            for name, value, remark in pairs
        ],
        class_="tiles",
    )


def key_figures(summary: Summary, series: RunSeries) -> list[tuple[str, str, str]]:
    shown: list[tuple[str, str, str]] = []
    for chart in series.charts[:2]:
        peak = summary.peaks.get(peak_kind(chart.id))
        if peak is not None and peak.bytes is not None:
            name = "Peak, process" if chart.id == "host" else f"Peak, {chart.id}"
            shown.append((name, format_bytes(peak.bytes), _of_limit(peak, chart.limit)))
    worst = summary.traced
    if worst.worst_peak_bytes is not None:
        step = worst.worst_step
        at = "of a step that did not end" if step is None else f"step {step:,}"
        where = "" if worst.worst_device in (None, "host") else f" on {worst.worst_device}"
        remark = f"{at}{where}{_mostly(series, step)}"
        name = "Peak in tensors" if worst.worst_exact else "Peak in tensors, at least"
        shown.append((name, format_bytes(worst.worst_peak_bytes), remark))
    seconds = summary.run.duration_s
    lasted = "" if seconds is None else format_duration(seconds)
    shown.append((_steps(summary, series), f"{_count(summary, series):,}", lasted))
    if (cost := _cost(summary)) is not None:
        shown.append(("memlog's own cost", *cost))
    return shown


def _cost(summary: Summary) -> tuple[str, str] | None:
    """Return memlog's share of the run's duration, with a remark; ``None`` if unknown."""
    health, duration = summary.health, summary.run.duration_s
    if health.overhead_ms_total is None or not duration:
        return None
    lost = sum(health.dropped.values())
    remark = f"of the run; {f'{lost:,} events lost' if lost else 'nothing lost'}"
    return f"{health.overhead_ms_total / 1e3 / duration:.2%}", remark


def _mostly(series: RunSeries, step: int | None) -> str:
    """Return the largest category of a traced step with its share, as text; empty if unknown."""
    event = next((trace for trace in series.traces if trace.step == step and trace.peak), None)
    if event is None or not event.at_peak:
        return ""
    name, size = max(event.at_peak.items(), key=lambda item: item[1])
    return f", {size / (event.peak or size):.0%} {name}"


def _of_limit(peak: Peak, limit: int | None) -> str:
    source = {"exact": "", "watermark": "at most", "sampled": "at least", None: ""}[peak.source]
    if limit and peak.bytes is not None:
        of = f"{peak.bytes / limit:.0%} of {format_bytes(limit)}"
        return ", ".join(part for part in (of, peak.at_step) if part)
    return ", ".join(part for part in (source, peak.at_step) if part)


def _steps(summary: Summary, series: RunSeries) -> str:
    return "Steps" if summary.steps or series.axis == "step" else f"{series.axis.title()}s"


def _count(summary: Summary, series: RunSeries) -> int:
    if summary.steps or not series.charts:
        return summary.steps
    return max(chart.x[-1] + chart.width for chart in series.charts)


def bad_end(run: RunDirectory) -> Element | None:
    """Return memlog's explanation of a bad end; ``None`` if there is none."""
    try:
        text = read_plain(run.path, f"{run.artifacts.name}/{POSTMORTEM_FILE}", _MOST_TEXT)
    except OSError:
        return None
    _, _, body = text.decode("utf-8", "replace").partition("\n")  # the first line is the verdict
    before, heading, helps = body.partition(_HELPS)
    if not heading:
        return section("end", "How the run ended", rendered(body))
    whole = el("details", el("summary", "How the run ended, in full"), rendered(before))
    return section("end", "What would help", rendered(helps), whole)


def memory(series: RunSeries, missing: str | None) -> Element | None:
    """Return the section with memory over steps; ``None`` if memory was never read.

    ``missing`` is the reason why charts can't be zoomed; ``None`` if charts can be zoomed.
    """
    if not series.charts:
        return None
    figures_ = [_chart(chart, series.axis) for chart in series.charts]
    note = None
    if missing is not None:
        note = el("p", "These charts can't be zoomed: ", *prose(missing), ".", class_="note")
    return section(
        "memory",
        f"Memory over {series.axis}s",
        el("div", figures_, id="charts"),
        note,
        _marks(series),
    )


def _chart(chart: Chart, axis: str) -> Element:
    note = None
    if chart.width > 1:
        text = f"each point shows the lowest and the highest of {chart.width:,} {axis}s."
        note = el("p", f"The run is long: {text}", class_="note")
    return el(
        "figure",
        el("figcaption", chart.title, _limit_text(chart)),
        el("div", drawings.line_chart(chart, axis), class_="plot", data_chart=chart.id),
        drawings.swatches(
            (drawings.curve_class(curve, number), curve.label)
            for number, curve in enumerate(chart.curves)
        ),
        note,
        as_table(_values(chart, axis)),
        id=f"figure-{chart.id}",
        class_="memory",
    )


def _limit_text(chart: Chart) -> Element | None:
    if chart.limit is None:
        return None
    peaks = [value for curve in chart.curves if curve.kind == "peak" for value in curve.high]
    most = max((value for value in peaks if value is not None), default=None)
    reached = "" if most is None or chart.limit <= 0 else f", {most / chart.limit:.0%} reached"
    return el("span", f" limit {format_bytes(chart.limit)}{reached}", class_="remark")


def as_table(made: Element) -> Element:
    """Return a table in a box that can be folded. The box is open until a script folds it."""
    return el("details", el("summary", "As a table"), made, open=True, class_="as-table")


def _values(chart: Chart, axis: str) -> Element:
    chosen = range(0, len(chart.x), max(1, -(-len(chart.x) // _TABLE_ROWS)))
    rows = [
        [f"{chart.x[at]:,}", *(format_bytes(curve.high[at]) for curve in chart.curves)]
        for at in dict.fromkeys([*chosen, len(chart.x) - 1])
    ]
    headings = [axis, *(curve.label for curve in chart.curves)]
    return table(f"{chart.title} by {axis}", headings, rows, numbers=range(1, len(headings)))


def _marks(series: RunSeries) -> Element | None:
    listed = [mark for mark in series.marks if mark.kind not in UNLISTED]
    if not listed:
        return None
    items = [
        el("li", el("span", el("strong", f"{series.axis} {mark.at:,}"), " ", *prose(mark.text)))
        for mark in listed[:LISTED]
    ]
    more = len(listed) - LISTED + series.omitted
    if more > 0:
        items.append(el("li", f"and {more:,} more"))
    heading = el("summary", "What happened when")
    return el("details", heading, el("ul", items), open=True, class_="as-table")


def traced(traces: Sequence[Trace], facts: TracedFacts) -> Element | None:
    """Return the section with the categories of the traced steps; ``None`` if no step was traced."""
    known = [
        trace for trace in traces if trace.peak is not None and sum(trace.at_peak.values()) > 0
    ]
    if not known:
        return None
    bars = [(_step_label(trace), trace.at_peak) for trace in known]
    worst = next(
        (
            trace
            for trace in reversed(known)
            if (trace.step, trace.peak) == (facts.worst_step, facts.worst_peak_bytes)
        ),
        known[-1],
    )
    caption = f"Memory at the peak of {len(known):,} traced steps, by category"
    held = ", ".join(
        f"{name} {format_bytes(size)}"
        for name, size in sorted(worst.at_peak.items(), key=lambda item: -item[1])[:3]
    )
    names = [name for name in drawings.CATEGORIES if any(name in sizes for _, sizes in bars)]
    rows = [
        [
            label,
            *(format_bytes(sizes.get(name, 0)) for name in names),
            format_bytes(sum(sizes.values())),
        ]
        for label, sizes in bars[:_TRACED_ROWS]
    ]
    return section(
        "categories", "What the memory is, in the traced steps",
        el(
            "p",
            f"Worst at {_step_label(worst)}: {held}. "
            "Only tensors are counted, without those that earlier steps kept.",
        ),
        el(
            "figure",
            drawings.stacked_bars(bars, f"{caption}. Worst at {_step_label(worst)}: {held}"),
            drawings.legend(names),
            as_table(table(caption, ["step", *names, "all"], rows, numbers=range(1, len(names) + 2))),
        ),
    )  # fmt: skip


def _step_label(trace: Trace) -> str:
    return "unfinished" if trace.step is None else f"step {trace.step:,}"


def moment(iso: str | None) -> str | None:
    """Return an ISO 8601 time as ``2026-01-31 12:00:00 UTC``; ``None`` if unknown."""
    return None if iso is None else f"{iso[:19].replace('T', ' ')} UTC"


def ranks(found: Sequence[Rank], total: int) -> Element | None:
    """Return the section with the ranks side by side; ``None`` if there are no ranks to show.

    ``total`` is the number of all ranks, including ranks that are not shown.
    """
    if not found:
        return None
    peaks = [rank.summary.peaks.get(peak_kind(rank.chart.id), UNKNOWN).bytes for rank in found]
    known = [peak for peak in peaks if peak is not None]
    most = max(known, default=0)
    rows: list[TableRow] = []
    for rank, peak in zip(found, peaks, strict=True):
        bar = drawings.share_bar((peak or 0) / most, "level") if most else None
        rows.append(
            [
                f"{rank.rank}",
                [format_bytes(peak), bar],
                format_bytes(rank.chart.limit),
                f"{rank.summary.steps:,}",
                rank.summary.status,
                rank.summary.run.host or "unknown",
                prose(rank.summary.verdict),
                el("code", rank.summary.run.id),
            ]
        )
    apart = most - min(known, default=0)
    headings = ["rank", "peak", "limit", "steps", "status", "host", "verdict", "run"]
    shown, which = f"{total}", ""
    if len(found) < total:
        shown = f"{len(found)} of {total:,}"
        which = " Shown are those with the most and the least memory at a step."
    return section(
        "ranks", f"{shown} ranks side by side",
        el("p", f"The highest and the lowest peak are {format_bytes(apart)} apart.{which}"),
        table("Ranks", headings, rows, numbers=(2, 3)),
    )  # fmt: skip


def longest_batch(summary: Summary) -> Element | None:
    """Return the section on the longest batch; ``None`` if the peaks follow no dimension of the inputs."""
    longest = summary.longest_batch
    if longest is None:
        return None
    lines = [el("p", *prose(line)) for line in (longest.text, *longest.evidence)]
    return section("longest", "The longest batch", *lines)


def failures(summary: Summary) -> Element | None:
    """Return the section with failed allocations that the program caught; ``None`` if there was none."""
    text = survived(summary)
    return section("failures", "Failed allocations", el("p", text)) if text else None


def alerts(summary: Summary) -> Element | None:
    """Return the section with the alerts; ``None`` if there was none."""
    if not summary.alerts:
        return None
    rows: list[TableRow] = [
        [
            alert.place or "before the first step",
            el("span", alert.level, class_=f"pill {alert.level}"),
            prose(alert.title),
            prose(alert.text),
            el("code", alert.rule),
        ]
        for alert in summary.alerts[:LISTED]
    ]
    return section(
        "alerts", "Alerts", table("Alerts", ["at", "level", "what", "details", "rule"], rows)
    )


def phases(summary: Summary) -> Element | None:
    """Return the section with the phases of the program; ``None`` if the program marked none."""
    if not summary.phases:
        return None
    rows: list[TableRow] = []
    for label, facts in list(summary.phases.items())[:LISTED]:
        for name, peak in facts.peaks.items():
            most = summary.peaks.get(peak_kind(name), UNKNOWN).bytes
            bar = drawings.share_bar((peak.at_least_bytes or 0) / most, "peak") if most else None
            rows.append(
                [
                    " > ".join([*facts.within, label]),
                    name,
                    [known_peak(peak), bar],
                    "yes" if peak.made_the_peak else "",
                    "" if peak.exact_step is None else f"step {peak.exact_step:,}",
                    f"{facts.count:,}",
                    format_duration(facts.duration_s),
                    f"{facts.errors:,}" if facts.errors else "",
                ]
            )
    headings = ["phase", "of", "peak", "made the run's peak", "exact at", "count", "time", "errors"]
    return section(
        "phases", "Phases",
        el("p", "A phase's peak is exact if it was a new maximum of the run. Otherwise it is the largest "
            "value that memlog read, and the real peak may be higher."),
        table("Phases", headings, rows, numbers=(2, 5)),
    )  # fmt: skip


def provenance(
    summary: Summary, name: str = "origin", title: str = "Where the run came from"
) -> Element:
    run = summary.run
    facts = {
        "run": f"{run.name} ({run.id})" if run.name else run.id,
        "project": run.project,
        "status": summary.status,
        "begun": moment(run.begun),
        "ended": moment(run.ended),
        "duration": None if run.duration_s is None else format_duration(run.duration_s),
        "host": run.host,
        "process": None if run.pid is None else str(run.pid),
        "devices": ", ".join(f"{name} ({device})" for name, device in run.devices.items()),
        **{
            _parameter(name): value
            for name, value in run.parameters.items()
            if name not in ("command", "devices")
        },
    }
    long = {"command": run.parameters.get("command"), "folder": run.directory}
    return section(name, title, _facts(long, "facts long"), _facts(facts))


def _parameter(name: str) -> str:
    """Return the name of one of the run's parameters as the page shows it: in words, and with its unit."""
    return (
        f"{name.removesuffix('_mib').replace('_', ' ')}{' (MiB)' if name.endswith('_mib') else ''}"
    )


def _facts(facts: Mapping[str, str | None], class_: str = "facts") -> Element:
    return el(
        "dl",
        [el("div", el("dt", name), el("dd", value)) for name, value in facts.items() if value],
        class_=class_,
    )


def health(summary: Summary) -> Element:
    known = summary.health
    facts = {
        "events recorded": f"{known.published:,}",
        "lost": _counted(known.dropped),
        "errors in memlog": _counted(known.faults),
        "time taken from training": known.overhead_text,
        "time for traced steps": _tracing(summary),
        **{
            f"sent to {name}": _delivered(name, delivery)
            for name, delivery in known.delivered.items()
        },
        **{f"rule {rule}": f"never judged: {why}" for rule, why in known.unjudged.items()},
    }
    return section("health", "memlog's own health", _facts(facts))


def _counted(counts: Mapping[str, int]) -> str:
    return ", ".join(f"{name} {count:,}" for name, count in counts.items()) or "none"


def _tracing(summary: Summary) -> str | None:
    if summary.traced.cost_ms is None or not summary.traced.steps:
        why = summary.traced.untraced
        return None if why is None else f"no step was traced: {why}"
    told = f"{summary.traced.cost_ms:,.0f} ms more than other steps, {summary.traced.steps:,} traced steps"
    cut = summary.traced.worst_cut
    return told if cut is None else f"{told}. {cut}"


def _delivered(name: str, one: Delivery) -> str:
    problem = f": {one.problem}" if one.problem else ""
    amount = "alerts" if name == WEBHOOK else f"{one.points:,} points"
    return f"{amount} when this report was made ({one.stage}){problem}"


_MAX_RANKS = 64
"""Maximum number of ranks that a report shows. Ranks with the most or the least memory have precedence."""
_POINTS = 500


class Rank(msgspec.Struct, frozen=True):
    rank: int
    summary: Summary
    chart: Chart
    """Memory of the rank's accelerator, or of its process if the rank has no accelerator."""


def find_ranks(run: RunDirectory, summary: Summary) -> tuple[list[Rank], int]:
    """Return the ranks that a report shows, in order, and the number of all ranks that have a run.

    The list is empty if no other rank's run is in the folder.
    """
    runs = ranks_of(run)
    if len(runs) < 2:  # noqa: PLR2004 - one run is no comparison
        return [], len(runs)
    shown = sorted(runs if len(runs) <= _MAX_RANKS else _shown(runs))
    ranks = (
        _read(rank, runs[rank], summary if runs[rank].id == run.id else None) for rank in shown
    )
    return [rank for rank in ranks if rank is not None], len(runs)


def _shown(found: Mapping[int, RunDirectory]) -> list[int]:
    """Return at most `_MAX_RANKS` ranks: those with the most or the least memory, then the lowest numbers."""
    most: dict[int, int] = {}
    least: dict[int, int] = {}
    for event in _events(found):
        by_name = {spread.name: spread for spread in event.spreads}
        spread = by_name.get("device/peak") or by_name.get("host/rss")
        if spread is not None:
            largest, smallest = spread.largest_rank, spread.smallest_rank
            most[largest] = max(spread.largest, most.get(largest, 0))
            least[smallest] = min(spread.smallest, least.get(smallest, spread.smallest))
    pairs = zip_longest(
        sorted(most, key=lambda rank: -most[rank]), sorted(least, key=lambda rank: least[rank])
    )
    wanted = (rank for rank in chain(*pairs, found) if rank in found)
    return list(islice(dict.fromkeys(wanted), _MAX_RANKS))


def _events(found: Mapping[int, RunDirectory]) -> Iterator[Ranks]:
    for run in found.values():
        yield from (event for event in run.events("ranks") if isinstance(event, Ranks))


def rank_chart(ranks: list[Rank]) -> Chart:
    by_rank = {f"rank {rank.rank}": rank.chart for rank in ranks}
    limit = next((rank.chart.limit for rank in ranks if rank.chart.limit is not None), None)
    return side_by_side("ranks", f"All ranks, {ranks[0].chart.main.label}", by_rank, limit)


def _read(rank: int, run: RunDirectory, known: Summary | None) -> Rank | None:
    charts = run_series(run, points=_POINTS).charts
    if not charts:
        return None
    return Rank(rank, known or summarize(run), charts[0])

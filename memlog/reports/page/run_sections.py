"""Sections of the page about the ranks, the phases, the alerts, the run's origin, and memlog itself."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from xml.etree.ElementTree import Element

from memlog._internal.units import format_bytes, format_duration
from memlog.facts.levels import UNKNOWN, peak_kind
from memlog.reports.page import drawings, sections
from memlog.reports.page.markup import TableRow, el, prose, table
from memlog.reports.page.ranks import Rank
from memlog.reports.phases import known_peak
from memlog.reports.schema import Delivery, Summary
from memlog.reports.survived import survived


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
    return sections.section(
        "ranks", f"{shown} ranks side by side",
        el("p", f"The highest and the lowest peak are {format_bytes(apart)} apart.{which}"),
        table("Ranks", headings, rows, numbers=(2, 3)),
    )  # fmt: skip


def longest_batch(summary: Summary) -> Element | None:
    """Return the section on the longest batch; ``None`` if the peaks follow no dimension of the inputs."""
    found = summary.longest_batch
    if found is None:
        return None
    lines = [el("p", *prose(line)) for line in (found.text, *found.evidence)]
    return sections.section("longest", "The longest batch", *lines)


def failures(summary: Summary) -> Element | None:
    """Return the section with failed allocations that the program caught; ``None`` if there was none."""
    text = survived(summary)
    return sections.section("failures", "Failed allocations", el("p", text)) if text else None


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
        for alert in summary.alerts[: sections.LISTED]
    ]
    return sections.section(
        "alerts", "Alerts", table("Alerts", ["at", "level", "what", "details", "rule"], rows)
    )


def phases(summary: Summary) -> Element | None:
    """Return the section with the phases of the program; ``None`` if the program marked none."""
    if not summary.phases:
        return None
    rows: list[TableRow] = []
    for label, facts in list(summary.phases.items())[: sections.LISTED]:
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
    return sections.section(
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
        "begun": sections.moment(run.begun),
        "ended": sections.moment(run.ended),
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
    return sections.section(name, title, _facts(long, "facts long"), _facts(facts))


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
        **{f"sent to {name}": _delivered(one) for name, one in known.delivered.items()},
        **{f"rule {rule}": f"never judged: {why}" for rule, why in known.unjudged.items()},
    }
    return sections.section("health", "memlog's own health", _facts(facts))


def _counted(counts: Mapping[str, int]) -> str:
    return ", ".join(f"{name} {count:,}" for name, count in counts.items()) or "none"


def _tracing(summary: Summary) -> str | None:
    if summary.traced.cost_ms is None or not summary.traced.steps:
        return None
    return f"{summary.traced.cost_ms:,.0f} ms more than other steps, {summary.traced.steps:,} traced steps"


def _delivered(one: Delivery) -> str:
    problem = f": {one.problem}" if one.problem else ""
    return f"{one.points:,} points when this report was made ({one.stage}){problem}"

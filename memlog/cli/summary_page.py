"""Page of ``memlog show``: a run's summary, for people."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from rich.console import Console, Group, RenderableType
from rich.padding import Padding
from rich.table import Table
from rich.text import Text

from memlog._internal.diagnostics import NOT_NOTICED
from memlog._internal.units import format_bytes, format_duration
from memlog.cli.addresses import place_of
from memlog.cli.label_tables import phases, points, scopes
from memlog.cli.output import (
    LEVEL_STYLES,
    STATUS_STYLES,
    local_time,
    number,
    plain,
    sign,
    table,
)
from memlog.events import PeakSource
from memlog.journal import RunDirectory
from memlog.ranks.named_run import lowest_rank
from memlog.reports.aggregates import ALLOCATED, RESERVED
from memlog.reports.largest_step import like_another, shapes
from memlog.reports.schema import (
    Delivery,
    LargestStep,
    MetricSummary,
    Peak,
    RunFacts,
    Summary,
    TracedFacts,
)
from memlog.reports.traced_steps import among
from memlog.reports.verdict import evidence_and_remedy
from memlog.sink import Axis

_AXES: tuple[Axis, ...] = ("step", "evaluation", "epoch")
_SOURCES: dict[PeakSource | None, str] = {
    "exact": "exact",
    "watermark": "watermark (upper bound)",
    "sampled": "sampled (lower bound)",
    None: "",
}
_UNITS = {"mib": "MiB", "ms": "ms"}
"""Units by the suffix of a metric's name."""
_STAGES = {"done": "green", "unreachable": "red"}
_RUNS_SHOWN = 5
_EMPTY = f"nothing: {NOT_NOTICED}"


def print_summary(console: Console, summary: Summary) -> None:
    console.print(plain(summary.verdict, "bold yellow" if summary.findings else "bold"))
    console.print()
    _print_head(console, summary)
    if summary.findings:
        _print_section(console, "Findings", _findings(summary))
    _print_section(console, "Peaks", _peaks(console, summary))
    if summary.largest_step is not None:
        facts = _largest_step(summary.largest_step)
        _print_section(console, "Inputs of the step that last raised the peak", _facts(facts))
    for axis in _AXES:
        metrics = {name: m for name, m in summary.metrics.items() if m.axis == axis}
        if metrics:
            _print_section(console, _metrics_heading(axis, metrics), _metrics(console, metrics))
    _print_labels(console, summary)
    if summary.traced.steps:
        facts = _traced(summary.traced, summary.run.duration_s)
        _print_section(console, "Traced steps", _facts(facts))
    if summary.alerts:
        _print_section(console, "Alerts", _alerts(console, summary))
    if summary.artifacts:
        _print_section(console, "Artifacts", _artifacts(console, summary))
    _print_section(console, "Delivery", _deliveries(console, summary))
    _print_section(console, "Health", _facts(_health(summary)))


def _print_labels(console: Console, summary: Summary) -> None:
    if summary.scopes:
        _print_section(console, "Blocks and functions", scopes(console, summary.scopes))
    if summary.phases:
        _print_section(console, "Phases", phases(console, summary.phases))
    if summary.points:
        _print_section(console, "Points", points(console, summary.points))


def _print_head(console: Console, summary: Summary) -> None:
    run = summary.run
    title = Text.assemble(
        "run ", plain(run.id, "bold"), "  ", (summary.status, STATUS_STYLES[summary.status])
    )
    if run.name:
        title.append("  ").append(plain(run.name))
    console.print(title)
    facts = _head(run, _steps(summary))
    if summary.status == "finished" and _is_empty(summary):
        facts["recorded"] = plain(_EMPTY, "yellow")
    console.print(_indented(_facts(facts)))


def _findings(summary: Summary) -> Group:
    parts: list[RenderableType] = []
    for finding in summary.findings:
        parts.append(plain(finding.title))
        parts += [_indented(plain(line)) for line in evidence_and_remedy(finding)]
    return Group(*parts)


def _is_empty(summary: Summary) -> bool:
    """Return True if the run has no data of the user's program."""
    return not (
        summary.steps or summary.metrics or summary.scopes or summary.points or summary.artifacts
    )


def _print_section(console: Console, heading: str, content: RenderableType) -> None:
    console.print()
    console.print(plain(heading, "bold"))
    console.print(_indented(content))


def _indented(content: RenderableType) -> Padding:
    return Padding(content, (0, 0, 0, 2), expand=False)


def _facts(facts: Mapping[str, str | Text]) -> Table:
    """Return a table with a name and its text on each line."""
    grid = Table.grid(padding=(0, 2, 0, 0))
    grid.add_column(style="dim", no_wrap=True)
    grid.add_column(overflow="fold")
    for name, text in facts.items():
        grid.add_row(plain(name), text if isinstance(text, Text) else plain(text))
    return grid


def _steps(summary: Summary) -> str:
    """Return the number of steps. If the first step is not step 0, return the first and the last step."""
    steps = summary.steps
    firsts = [metric.first_index for metric in summary.metrics.values() if metric.axis == "step"]
    if min(firsts, default=0) > 0:
        return f"steps {min(firsts):,} to {steps - 1:,}"
    return f"{steps:,} {'step' if steps == 1 else 'steps'}"


def _head(run: RunFacts, steps: str) -> dict[str, str | Text]:
    facts: dict[str, str | Text] = {}
    if run.project:
        facts["project"] = run.project
    facts["begun"] = f"{local_time(run.begun)}, {steps} in {format_duration(run.duration_s)}"
    facts["process"] = f"{run.pid or 'unknown'} on {run.host or 'unknown'}"
    facts["folder"] = run.directory
    for name, device in run.devices.items():
        product = device.product or "unknown product"
        facts[name] = f"{product}, {format_bytes(device.capacity_bytes)}"
    if run.parameters:
        known = (f"{name}={value}" for name, value in run.parameters.items())
        facts["parameters"] = ", ".join(known)
    return facts


def _peaks(console: Console, summary: Summary) -> Table:
    headings = ("memory", "peak", "how obtained", "at")
    made = table(console, *headings, right=["peak"], folded=["how obtained"])
    for kind, peak in summary.peaks.items():
        made.add_row(
            plain(kind),
            format_bytes(peak.bytes) + _share(summary.run, kind, peak),
            _SOURCES[peak.source],
            _where(peak),
        )
    return made


def _largest_step(found: LargestStep) -> dict[str, str | Text]:
    facts: dict[str, str | Text] = {
        "step": f"{found.step:,}, {found.device} peak {format_bytes(found.peak_bytes)}",
        "inputs": shapes(found.inputs),
    }
    if found.like_step is not None:
        facts["but"] = like_another(found.like_step)
    return facts


def _share(run: RunFacts, kind: str, peak: Peak) -> str:
    """Return a device's peak as a share of its capacity; empty if either is unknown."""
    device = run.devices.get(kind.removesuffix(ALLOCATED).removesuffix(RESERVED))
    if device is None or not device.capacity_bytes or peak.bytes is None:
        return ""
    return f" ({peak.bytes / device.capacity_bytes:.0%})"


def _where(peak: Peak) -> str:
    if peak.step is not None:
        return f"step {peak.step:,}"
    return "" if peak.evaluation is None else f"evaluation {peak.evaluation:,}"


def _metrics_heading(axis: Axis, metrics: Mapping[str, MetricSummary]) -> str:
    first = min(metric.first_index for metric in metrics.values())
    last = max(metric.last_index for metric in metrics.values())
    if first == last:
        return f"Metrics of {axis} {first:,}"
    return f"Metrics of {axis}s {first:,} to {last:,}"


def _metrics(console: Console, metrics: Mapping[str, MetricSummary]) -> Table:
    figures = ("last", "min", "max")
    made = table(console, "name", "unit", *figures, right=figures, folded=["name"])
    # The user's metrics stand above memlog's metrics of itself.
    for name, metric in sorted(metrics.items(), key=lambda item: item[0].startswith("memlog/")):
        unit = _UNITS.get(name.rpartition("_")[2], "")
        made.add_row(plain(name), unit, number(metric.last), number(metric.min), number(metric.max))
    return made


def _traced(traced: TracedFacts, duration_s: float | None) -> dict[str, str | Text]:
    facts: dict[str, str | Text] = {"peak": f"unknown; {traced.steps:,} traced"}
    if traced.worst_peak_bytes is not None:
        step = "a step that did not end"
        if traced.worst_step is not None:
            step = f"step {traced.worst_step:,}"
        facts["peak"] = (
            f"{format_bytes(traced.worst_peak_bytes)} in tensors"
            f" ({'exact' if traced.worst_exact else 'lower bound'}), {step}: {among(traced.steps)}"
        )
    if traced.cost_ms is not None and traced.set_up_ms is not None:
        share = f", {traced.cost_ms / 1e3 / duration_s:.1%} of the run" if duration_s else ""
        cost, set_up = (format_duration(ms / 1e3) for ms in (traced.cost_ms, traced.set_up_ms))
        facts["cost"] = f"{cost}{share}; {set_up} more to set up"
    return facts


def _alerts(console: Console, summary: Summary) -> Table:
    made = table(console, "at", "level", "rule", "what", folded=["rule", "what"])
    for alert in summary.alerts:
        # The title of a finding's alert ends in a full stop. The title of a rule's alert does not.
        text = plain(f"{alert.title.rstrip('.')}: {alert.text}" if alert.text else alert.title)
        level = plain(alert.level, LEVEL_STYLES[alert.level])
        made.add_row(alert.place, level, plain(alert.rule), text)
    return made


def _artifacts(console: Console, summary: Summary) -> Table:
    file = "file in the run's folder"
    made = table(console, "name", "kind", "size", file, right=["size"], folded=["name", file])
    for artifact in summary.artifacts:
        size = format_bytes(artifact.size_bytes)
        made.add_row(plain(artifact.name), plain(artifact.kind), size, plain(artifact.path))
    return made


def _deliveries(console: Console, summary: Summary) -> RenderableType:
    delivered = summary.health.delivered
    run = RunDirectory(Path(summary.run.directory))
    sync = run.command("sync")
    if not delivered:
        first = lowest_rank(run)
        if first.id != run.id and first.files("ranks"):
            return plain(
                f"with run {first.id}, which has the smallest, mean and largest memory of all ranks; "
                f"`{sync} --to mlflow` delivers this rank's own"
            )
        return plain(f"to no tracker; `{sync} --to mlflow` delivers it to one")
    facts: dict[str, str | Text] = {
        name: _delivery(console, name, delivery) for name, delivery in delivered.items()
    }
    unfinished = any(delivery.stage != "done" for delivery in delivered.values())
    if unfinished and summary.status != "running":
        facts[""] = f"`{sync}` delivers the rest"
    return _facts(facts)


def _delivery(console: Console, name: str, delivery: Delivery) -> Text:
    text = Text(f"{delivery.points:,} points")
    if delivery.stage != "done":
        text = text.append(" delivered") if delivery.points else Text("nothing delivered")
        text.append(", ").append(delivery.stage, _STAGES.get(delivery.stage, ""))
    elif not delivery.problem:
        text.append(" ").append(sign(console, "✓", "done"), _STAGES["done"])
    if delivery.problem:
        text.append(": ").append(plain(delivery.problem))
    for run in delivery.runs[:_RUNS_SHOWN]:
        kind = "own run" if run.own else "run"
        title = f" {run.name!r}" if run.name else ""
        text.append(f"\n{kind} ").append(plain(f"{run.id}{title}{place_of(name, run.uri)}"))
        if run.offset > 0:
            text.append(f"; its step 0 is step {run.offset:,} here")
    if len(delivery.runs) > _RUNS_SHOWN:
        more = len(delivery.runs) - _RUNS_SHOWN
        text.append("\nand 1 more run" if more == 1 else f"\nand {more:,} more runs")
    return text


def _health(summary: Summary) -> dict[str, str | Text]:
    health, thinned = summary.health, ""
    if health.thinned:
        thinned = f", {health.thinned:,} of them removed to keep the journal's size limit"
    facts: dict[str, str | Text] = {
        "published": f"{health.published:,} events{thinned}",
        "dropped": _counted(health.dropped),
        "faults": _counted(health.faults),
        "overhead": health.overhead_text,
    }
    if health.journal_queued:
        facts["journal"] = plain(
            "the disk was slow, so writing moved to a queue: a crash may have lost the newest events",
            "yellow",
        )
    if health.unjudged:
        rules = "; ".join(f"{rule} ({why})" for rule, why in health.unjudged.items())
        facts["never judged"] = plain(rules, "yellow")
    if summary.omitted:
        facts["omitted"] = _counted(summary.omitted)
    return facts


def _counted(counts: Mapping[str, int]) -> str | Text:
    if not counts:
        return "none"
    listed = ", ".join(f"{name} {count:,}" for name, count in counts.items())
    return plain(listed, "yellow")

"""Page of ``memlog show --all``, and the parts that the short page has, too."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping
from pathlib import Path

from rich.console import Console, Group, RenderableType
from rich.padding import Padding
from rich.table import Table
from rich.text import Text

from memlog._internal.diagnostics import REPORT_STEPS
from memlog._internal.terminal import format_bytes, format_duration, format_number
from memlog.cli.addresses import place_of
from memlog.cli.output import (
    LEVEL_STYLES,
    STATUS_STYLES,
    local_time,
    plain,
    saving_table,
    sign,
    table,
)
from memlog.events import ALLOCATED, CGROUP, CUT_BRIEFLY, HOST_RSS, OTHER_PROCESSES, PeakSource
from memlog.facts.levels import Peak, among
from memlog.findings import evidence_and_remedy
from memlog.journal import RunDirectory
from memlog.ranks.registration import lowest_rank
from memlog.reports.accumulator import known_peak
from memlog.reports.final_state import like_another, role, shapes
from memlog.reports.postmortem import survived
from memlog.reports.schema import (
    Delivery,
    LargestStep,
    Levels,
    MetricSummary,
    PhaseFacts,
    PointFacts,
    RunFacts,
    ScopeFacts,
    Summary,
    TracedFacts,
)
from memlog.sink import WEBHOOK, Axis

_AXES: tuple[Axis, ...] = ("step", "evaluation", "epoch")
_SOURCES: dict[PeakSource | None, str] = {
    "exact": "exact",
    "watermark": "watermark (upper bound)",
    "sampled": "sampled (lower bound)",
    None: "",
}
_LEAST_OTHERS = 0.05
"""Other processes' memory on a device is shown from this share of the device on."""
_UNITS = {"mib": "MiB", "ms": "ms"}
"""Units by the suffix of a metric's name."""
_EMPTY = (
    f"nothing: memlog noticed no optimizer step in this process. If it trains, {REPORT_STEPS}. "
    "If its child processes train, start it with `memlog run`, without memlog.init()"
)


def print_everything(console: Console, summary: Summary) -> None:
    """Print a run's summary with all sections. The first line is the verdict."""
    console.print(headline(summary))
    console.print()
    console.print(head(summary))
    if summary.findings:
        _print_section(console, "Findings", _findings(summary))
    _print_section(console, "Peaks", peaks(console, summary, all_peaks(summary)))
    _print_inputs(console, summary)
    if failures := survived(summary):
        _print_section(console, "Failed allocations", plain(failures))
    for axis in _AXES:
        metrics = {name: m for name, m in summary.metrics.items() if m.axis == axis}
        if metrics:
            _print_section(console, _metrics_heading(axis, metrics), _metrics(console, metrics))
    _print_labels(console, summary)
    if summary.traced.steps:
        facts = _traced(summary.traced, summary.run.duration_s)
        _print_section(console, "Traced steps", table_of(facts))
    elif summary.traced.untraced:
        _print_section(console, "Traced steps", table_of({"none": plain(summary.traced.untraced)}))
    if summary.saving:
        partial = " (only parameters that are trained are known)" * summary.saving_is_partial
        _print_section(console, f"Saving{partial}", saving_table(console, summary.saving))
    if summary.alerts:
        _print_section(console, "Alerts", _alerts(console, summary))
    if summary.artifacts:
        _print_section(console, "Artifacts", _artifacts(console, summary))
    delivered = deliveries(console, summary)
    content = delivered if isinstance(delivered, Text) else table_of(delivered)
    _print_section(console, "Delivery", content)
    _print_section(console, "Health", table_of(health_facts(summary)))


def _print_inputs(console: Console, summary: Summary) -> None:
    if summary.largest_step is not None:
        facts = _largest_step(summary.largest_step, summary.peaks)
        _print_section(console, "Inputs of the largest step", table_of(facts))
    longest = summary.longest_batch
    if longest is not None:
        needs = {"needs": longest.text, "from": "; ".join(longest.evidence)}
        shown = {name: plain(text) for name, text in needs.items() if text}
        _print_section(console, "Longest batch", table_of(shown))


def _print_labels(console: Console, summary: Summary) -> None:
    if summary.scopes:
        _print_section(console, "Blocks and functions", scopes(console, summary.scopes))
    if summary.phases:
        _print_section(console, "Phases", phases(console, summary.phases))
    if summary.points:
        _print_section(console, "Points", points(console, summary.points))


def headline(summary: Summary) -> Text:
    return plain(summary.verdict, "bold yellow" if summary.findings else "bold")


def head(summary: Summary, *, short: bool = False) -> Group:
    """Return the run's id, status and names, followed by a table of facts about the run."""
    run = summary.run
    title = Text.assemble(
        "run ", plain(run.id, "bold"), "  ", (summary.status, STATUS_STYLES[summary.status])
    )
    if summary.names:
        title.append("  ").append(plain(", ".join(summary.names)))
    facts = _head(run, _steps(summary), short=short)
    if summary.status == "finished" and _is_empty(summary):
        facts["recorded"] = plain(_EMPTY, "yellow")
    return Group(title, indented(table_of(facts)))


def _findings(summary: Summary) -> Group:
    parts: list[RenderableType] = []
    for finding in summary.findings:
        parts.append(plain(finding.title))
        parts += [indented(plain(line)) for line in evidence_and_remedy(finding)]
    return Group(*parts)


def _is_empty(summary: Summary) -> bool:
    """Return True if the run has no data of the user's program."""
    return not (
        summary.steps or summary.metrics or summary.scopes or summary.points or summary.artifacts
    )


def _print_section(console: Console, heading: str, content: RenderableType) -> None:
    console.print(section(heading, content))


def section(heading: str, content: RenderableType) -> Group:
    return Group("", plain(heading, "bold"), indented(content))


def indented(content: RenderableType) -> Padding:
    return Padding(content, (0, 0, 0, 2), expand=False)


def table_of(facts: Mapping[str, str | Text]) -> Table:
    """Return a table with a name and its text on each line."""
    grid = Table.grid(padding=(0, 2, 0, 0))
    grid.add_column(style="dim", no_wrap=True)
    grid.add_column(overflow="fold")
    for name, text in facts.items():
        grid.add_row(plain(name), text if isinstance(text, Text) else plain(text))
    return grid


def _steps(summary: Summary) -> str:
    """Return the number of steps. If the first step is not step 0, return the first and the last step."""
    steps, first = summary.steps, summary.first_step
    counted = f"{steps:,} {'step' if steps == 1 else 'steps'}"
    if first and summary.last_step is not None:
        return f"{counted} ({first:,} to {summary.last_step:,})"
    return counted


def _head(run: RunFacts, steps: str, *, short: bool) -> dict[str, str | Text]:
    facts: dict[str, str | Text] = {}
    if run.project and not short:
        facts["project"] = run.project
    facts["begun"] = f"{local_time(run.begun)}, {steps} in {format_duration(run.duration_s)}"
    if not short:
        facts["process"] = f"{run.pid or 'unknown'} on {run.host or 'unknown'}"
    facts["folder"] = run.directory
    devices = {name: str(device) for name, device in run.devices.items()}
    if short and len(devices) > 1:
        counted = Counter(devices.values())
        facts["devices"] = "; ".join(f"{count} of {name}" for name, count in counted.items())
    else:
        facts.update(devices)
    if run.parameters and not short:
        known = (f"{name}={value}" for name, value in run.parameters.items())
        facts["parameters"] = ", ".join(known)
    return facts


def all_peaks(summary: Summary) -> list[tuple[str, Peak]]:
    """Return the peaks by kind of memory, without those of a container that has no limit.

    The container's comes last. Other processes' memory on a device is left out if it is small.
    """
    return [
        (kind, peak)
        for kind, peak in sorted(summary.peaks.items(), key=lambda item: item[0] == CGROUP)
        if (kind != CGROUP or summary.cgroup_limit_bytes is not None)
        and not (
            kind.endswith(OTHER_PROCESSES) and (_part(summary.run, kind, peak) or 0) < _LEAST_OTHERS
        )
    ]


def peaks(console: Console, summary: Summary, shown: Iterable[tuple[str, Peak]]) -> Table:
    headings = ("memory", "peak", "how obtained", "at")
    made = table(console, *headings, right=["peak"], folded=["how obtained"])
    for kind, peak in shown:
        made.add_row(
            plain(kind),
            format_bytes(peak.bytes) + _share(summary.run, kind, peak),
            _SOURCES[peak.source],
            plain(peak.place + _phase(summary, kind)),
        )
    return made


def _largest_step(found: LargestStep, peaks: dict[str, Peak]) -> dict[str, str | Text]:
    peak = f"{found.device}, {format_bytes(found.peak_bytes)}"
    facts: dict[str, str | Text] = {
        "step": f"{found.step:,}, which {role(found, peaks)} ({peak})",
        "inputs": shapes(found.inputs),
    }
    if found.like_step is not None:
        facts["but"] = like_another(found.like_step)
    return facts


def _share(run: RunFacts, kind: str, peak: Peak) -> str:
    """Return a device's peak as a share of its capacity; empty if either is unknown."""
    part = _part(run, kind, peak)
    return "" if part is None else f" ({part:.0%})"


def _part(run: RunFacts, kind: str, peak: Peak) -> float | None:
    """Return a device's peak divided by its capacity; ``None`` if either is unknown."""
    device = run.devices.get(kind.rpartition(".")[0])
    if device is None or not device.capacity_bytes or peak.bytes is None:
        return None
    return peak.bytes / device.capacity_bytes


def _phase(summary: Summary, kind: str) -> str:
    """Return the phase that reached a peak; empty if none did, or if that is unknown."""
    name = "host" if kind == HOST_RSS else kind.removesuffix(ALLOCATED)
    made = (
        label
        for label, facts in summary.phases.items()
        if name in facts.peaks and facts.peaks[name].made_the_peak
    )
    label = next(made, None)
    return "" if label is None else f", in `{label}`"


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
        made.add_row(
            plain(name),
            unit,
            format_number(metric.last),
            format_number(metric.min),
            format_number(metric.max),
        )
    return made


def _traced(traced: TracedFacts, duration_s: float | None) -> dict[str, str | Text]:
    facts: dict[str, str | Text] = {"peak": worst_traced(traced)}
    if traced.worst_cut is not None:
        facts["part"] = plain(traced.worst_cut.replace("`", ""))
    both = tracing_ms(traced)
    if both and traced.set_up_ms is not None:
        share = f", {both / 1e3 / duration_s:.1%} of the run" if duration_s else ""
        cost, set_up = (format_duration(ms / 1e3) for ms in (both, traced.set_up_ms))
        facts["cost"] = f"{cost}{share}; {set_up} of it in the first two"
    return facts


def tracing_ms(traced: TracedFacts) -> float:
    """Return the milliseconds that tracing took, its set-up included; 0 if that is unknown."""
    return (traced.cost_ms or 0.0) + (traced.set_up_ms or 0.0)


def worst_traced(traced: TracedFacts) -> str:
    if traced.worst_peak_bytes is None:
        return f"unknown; {traced.steps:,} traced"
    step = "a step that did not end"
    if traced.worst_step is not None:
        step = f"step {traced.worst_step:,}"
    device = traced.worst_device
    where = f" on {device}" if device not in (None, "host") else ""
    bound = "exact" if traced.worst_exact else "lower bound"
    if traced.worst_cut is not None:
        bound += f": {CUT_BRIEFLY}"
    peak = f"{format_bytes(traced.worst_peak_bytes)} in tensors{where} ({bound})"
    return f"{peak}, {step}: {among(traced.steps)}"


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


def health_facts(summary: Summary) -> dict[str, str | Text]:
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


_SHOWN = 50
"""Maximum number of labels in a table. The JSON document also has the labels that a table omits."""


def scopes(console: Console, by_label: Mapping[str, ScopeFacts]) -> Table:
    """Return a table with rows for each label's blocks: one for the host, and one for each accelerator."""
    made = _made(console, "count", "time", "last change", "largest change", "peak", "errors")
    for label, facts in list(by_label.items())[:_SHOWN]:
        made.add_row(
            plain(label),
            "host",
            f"{facts.count:,}",
            format_duration(facts.duration_s),
            *_changes(facts.rss_change),
            "",
            f"{facts.errors:,}" if facts.errors else "",
        )
        for name, device in facts.devices.items():
            source = "" if device.peak_source in {None, "exact"} else f" ({device.peak_source})"
            peak = format_bytes(device.peak_bytes) + source
            made.add_row("", plain(name), "", "", *_changes(device.allocated_change), peak, "")
    return _with_the_rest(made, len(by_label))


def phases(console: Console, by_label: Mapping[str, PhaseFacts]) -> Table:
    """Return a table with rows for each label's phases: one for the host, and one for each accelerator."""
    made = _made(console, "count", "time", "peak", "made", "errors")
    for label, facts in list(by_label.items())[:_SHOWN]:
        once = (
            f"{facts.count:,}",
            format_duration(facts.duration_s),
            f"{facts.errors:,}" if facts.errors else "",
        )
        title = plain(" > ".join([*facts.within, label]))
        for name, peak in facts.peaks.items():
            count, time, errors = once
            maker = "the run's peak" if peak.made_the_peak else ""
            made.add_row(title, plain(name), count, time, known_peak(peak), maker, errors)
            title, once = Text(), ("", "", "")
    return _with_the_rest(made, len(by_label))


def points(console: Console, by_label: Mapping[str, PointFacts]) -> Table:
    """Return a table with rows for each label's points: one for the host, and one for each accelerator."""
    made = _made(console, "count", "last", "largest")
    for label, facts in list(by_label.items())[:_SHOWN]:
        made.add_row(plain(label), "host", f"{facts.count:,}", *_sizes(facts.rss))
        for name, levels in facts.allocated.items():
            made.add_row("", plain(name), "", *_sizes(levels))
    return _with_the_rest(made, len(by_label))


def _made(console: Console, *figures: str) -> Table:
    return table(console, "label", "of", *figures, right=figures, folded=["label"])


def _with_the_rest(made: Table, labels: int) -> Table:
    if labels > _SHOWN:
        made.add_row(f"and {labels - _SHOWN:,} more labels: --json has them")
    return made


def _sizes(levels: Levels) -> tuple[str, str]:
    return format_bytes(levels.last_bytes), format_bytes(levels.largest_bytes)


def _changes(levels: Levels) -> tuple[str, str]:
    return _signed(levels.last_bytes), _signed(levels.largest_bytes)


def _signed(size: int | None) -> str:
    return f"+{format_bytes(size)}" if size is not None and size > 0 else format_bytes(size)


_STAGES = {"done": "green", "unreachable": "red"}
_RUNS_SHOWN = 5


def deliveries(console: Console, summary: Summary) -> Text | dict[str, str | Text]:
    """Return one entry for each tracker; if there is none, a sentence that says so."""
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
    return trackers(console, summary)


def trackers(console: Console, summary: Summary, *, short: bool = False) -> dict[str, str | Text]:
    """Return one entry for each tracker, and how to deliver what it lacks."""
    delivered = summary.health.delivered
    sync = RunDirectory(Path(summary.run.directory)).command("sync")
    runs = 1 if short else _RUNS_SHOWN
    facts: dict[str, str | Text] = {
        name: _delivery(console, name, delivery, runs) for name, delivery in delivered.items()
    }
    unfinished = any(delivery.stage != "done" for delivery in delivered.values())
    if unfinished and summary.status != "running":
        facts[""] = f"`{sync}` delivers the rest"
    return facts


def _delivery(console: Console, name: str, delivery: Delivery, shown: int) -> Text:
    # A webhook gets alerts only, and has no runs.
    runs = [] if name == WEBHOOK else delivery.runs
    text = Text("alerts" if name == WEBHOOK else f"{delivery.points:,} points")
    if delivery.stage != "done":
        text = text.append(" delivered") if delivery.points else Text("nothing delivered")
        text.append(", ").append(delivery.stage, _STAGES.get(delivery.stage, ""))
    elif not delivery.problem:
        text.append(" ").append(sign(console, "✓", "done"), _STAGES["done"])
    if delivery.problem:
        text.append(": ").append(plain(delivery.problem))
    for run in runs[:shown]:
        kind = "own run" if run.own else "run"
        title = f" {run.name!r}" if run.name else ""
        text.append(f"\n{kind} ").append(plain(f"{run.id}{title}{place_of(name, run.uri)}"))
        if run.offset > 0:
            text.append(f"; its step 0 is step {run.offset:,} here")
        elif run.offset < 0:
            text.append(f"; step 0 here is its step {-run.offset:,}")
    if len(runs) > shown:
        more = len(runs) - shown
        text.append("\nand 1 more run" if more == 1 else f"\nand {more:,} more runs")
    return text

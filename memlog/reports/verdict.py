"""Verdict on a run's memory: the most important finding, or a sentence which says that nothing grew."""

from __future__ import annotations

from collections.abc import Iterable

from memlog._internal.units import format_bytes
from memlog.events import Finding, OutOfMemory
from memlog.reports.schema import AlertFacts, FindingFacts

_CONFIDENCE = {"high": 0, "medium": 1, "low": 2}


def ranked(findings: Iterable[Finding]) -> list[Finding]:
    """Return findings, the most important first.

    Of several findings with the same kind and the same ``where``, only the newest is kept.

    Findings about growth come before findings about waste that does not grow. Within each group, known causes
    come first. Findings of equal rank are ordered by the step at which the limit can be reached, the earliest
    first, and then by growth, the fastest first.
    """
    newest = {(finding.kind, finding.where): finding for finding in findings}
    return sorted(newest.values(), key=_importance)


def _importance(finding: Finding) -> tuple[bool, bool, float, float, int]:
    ends = float("inf") if finding.forecast is None else float(finding.forecast[0])
    return (
        not finding.rate,
        finding.kind == "growth",  # the cause is unknown
        ends,
        -(finding.rate or 0.0),
        _CONFIDENCE[finding.confidence],
    )


def sentence(finding: Finding) -> str:
    """Return one sentence on a finding, its growth and its forecast."""
    title = finding.title.rstrip(".")
    if not finding.rate:
        return f"{title}."
    since = "" if finding.since_step is None else f" since step {finding.since_step:,}"
    grows = "" if title.endswith(" grows") else ". Memory grows"
    return f"{title}{grows} by {format_bytes(finding.rate)} a step{since}{_forecast(finding)}."


def _forecast(finding: Finding) -> str:
    if finding.forecast is None:
        return ""
    low, high = finding.forecast
    steps = f"step {low:,}" if low == high else f"step {low:,} to {high:,}"
    limit = "" if finding.limit is None else f" ({format_bytes(finding.limit)})"
    return f", and memory runs out at {steps}{limit}"


def evidence_and_remedy(finding: Finding | FindingFacts) -> list[str]:
    """Return the lines below a finding's sentence: its evidence, its confidence, and what to do."""
    lines = [*finding.evidence, f"confidence: {finding.confidence}"]
    if finding.remedy:
        lines.append(f"what to do: {finding.remedy}")
    return lines


def beyond(verdict: str, alerts: Iterable[AlertFacts]) -> list[AlertFacts]:
    """Return the alerts that do not repeat the verdict: those whose title is not in the verdict."""
    return [alert for alert in alerts if alert.title not in verdict]


def failure_title(failure: OutOfMemory, last_step: int | None) -> str:
    """Return one line on a failed allocation: its device or worker, the last complete step, and its size.

    ``last_step`` is ``None`` if no step was complete.
    """
    after = after_step(last_step)
    if failure.worker is not None:
        place = f"in {failure.worker}"
    else:
        place = "on the host" if failure.device == "host" else f"on {failure.device}"
    wanted = "" if failure.requested is None else f", {format_bytes(failure.requested)} requested"
    return f"Out of memory {place} {after}{wanted}"


def after_step(last_step: int | None) -> str:
    """Return ``after step 12``, or ``before the end of the first step`` if no step was complete."""
    return "before the end of the first step" if last_step is None else f"after step {last_step}"

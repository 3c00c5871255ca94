"""Judge memlog's findings against the truth: pure functions on records."""

from __future__ import annotations

import re
import statistics
from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple

import msgspec

from benchmarks.insight.expected import Expected


class Forecast(msgspec.Struct, frozen=True):
    """Steps between which the limit will be reached."""

    earliest_step: int
    latest_step: int
    limit_bytes: int | None = None


class Finding(msgspec.Struct, frozen=True):
    """A finding of `memlog show --json`; docs/show-json.md explains the fields. Other fields are ignored."""

    kind: str
    title: str = ""
    where: str | None = None
    rate: float | None = None
    forecast: Forecast | None = None
    evidence: tuple[str, ...] = ()
    remedy: str | None = None

    @property
    def tells_growth(self) -> bool:
        """True if the finding names a rate at which memory grows."""
        return self.rate is not None and self.rate > 0


class Truth(NamedTuple):
    """Measurements of a script that grows, without memlog.

    Attributes:
        rate: Growth in bytes per step.
        last_step: Number of the last step.
        room: Bytes left until the limit at the last step; None if unknown.
    """

    rate: float
    last_step: int
    room: float | None


class Score(NamedTuple):
    """The result for one run of one script.

    ``cause`` and the fields after it are about the first finding that detects the fault. They are None if no
    finding does, except for ``kind``.

    Attributes:
        detected: True if the fault was found; None if the script has no fault.
        false_alarm: True if a fault was found that the script does not have.
        cause: True if the finding has one of the right kinds.
        best_cause: True if the finding has the first of these kinds.
        place: True if the finding names the place.
        rate_error: Relative error of the finding's rate; None if no rate, or no true rate, is known.
        forecast_error: Relative error of the middle of the finding's forecast; None without a forecast.
        kind: Kind of the finding. If no finding detects the fault: kind of the run's first finding.
    """

    detected: bool | None
    false_alarm: bool
    cause: bool | None = None
    best_cause: bool | None = None
    place: bool | None = None
    rate_error: float | None = None
    forecast_error: float | None = None
    kind: str | None = None


def findings_of(document: dict[str, Any]) -> list[Finding]:
    """Return the findings in a document of `memlog show --json`, or an empty list if the field is missing."""
    return msgspec.convert(document.get("findings") or [], list[Finding])


def judge(
    expected: Expected,
    findings: Sequence[Finding],
    truth: Truth | None = None,
    marks: Iterable[str] = (),
) -> Score:
    """Compare the findings of a run with the truth about its script.

    If memory grows, each finding with a rate counts as detection, and no other finding does. If the script
    wastes memory once, each finding of an expected kind counts as detection, and a finding with a rate and
    another kind is a false alarm. Any finding about a healthy script is a false alarm.

    Args:
        expected: The truth about the script.
        findings: The findings, the most important one first.
        truth: The measured growth.
        marks: The marked lines, such as ``script.py:12``. A finding that contains one names the place.
    """
    if not expected.faulty:
        return Score(None, bool(findings), kind=findings[0].kind if findings else None)
    if expected.grows:
        hits = [finding for finding in findings if finding.tells_growth]
        wrong = False
    else:
        hits = [finding for finding in findings if finding.kind in expected.kinds]
        wrong = any(f.tells_growth and f.kind not in expected.kinds for f in findings)
    if not hits:
        return Score(False, wrong, kind=findings[0].kind if findings else None)
    first = hits[0]
    return Score(
        True,
        wrong,
        cause=first.kind in expected.kinds,
        best_cause=first.kind == expected.kinds[0],
        place=names_place(first, (*expected.where, *marks)),
        rate_error=_rate_error(first, truth),
        forecast_error=_forecast_error(first, truth),
        kind=first.kind,
    )


def names_place(finding: Finding, texts: Iterable[str]) -> bool:
    """Return True if one of the texts occurs as a whole word in the finding's place, title or evidence."""
    said = "\n".join((finding.where or "", finding.title, *finding.evidence))
    return any(re.search(_whole(text), said) for text in texts)


def _whole(text: str) -> str:
    begin = r"(?<!\w)" if text[0].isalnum() or text[0] == "_" else ""
    end = r"(?!\w)" if text[-1].isalnum() or text[-1] == "_" else ""
    return begin + re.escape(text) + end


def _rate_error(finding: Finding, truth: Truth | None) -> float | None:
    if truth is None or truth.rate <= 0 or finding.rate is None:
        return None
    return abs(finding.rate - truth.rate) / truth.rate


def _forecast_error(finding: Finding, truth: Truth | None) -> float | None:
    if truth is None or truth.rate <= 0 or truth.room is None or finding.forecast is None:
        return None
    real = truth.last_step + truth.room / truth.rate
    middle = (finding.forecast.earliest_step + finding.forecast.latest_step) / 2
    return abs(middle - real) / real


class Summary(NamedTuple):
    """Figures over all scripts: shares from 0 to 1, None if there was nothing to count.

    Attributes:
        recall: Share of the faults that are detected.
        precision: Detected faults divided by detected faults plus false alarms, over the first seed.
        cause: Share of the detected faults with a right cause.
        best_cause: Share of the detected faults with the best cause.
        place: Share of the detected faults whose place is named.
        rate_error: Median relative error of the rate.
        forecast_error: Median relative error of the forecast.
        forecasts: Number of forecasts that could be judged.
        false_alarms: Runs of healthy scripts with a finding, over all seeds.
        healthy_runs: Runs of healthy scripts.
        cost: Median of the time with memlog divided by the time without memlog.
    """

    recall: float | None
    precision: float | None
    cause: float | None
    best_cause: float | None
    place: float | None
    rate_error: float | None
    forecast_error: float | None
    forecasts: int
    false_alarms: int
    healthy_runs: int
    cost: float | None


def summarise(first: Sequence[Score], more: Sequence[Score], costs: Sequence[float]) -> Summary:
    """Summarise scores.

    Args:
        first: One score of each script, of the first seed.
        more: Scores of healthy scripts with further seeds.
        costs: For each script, the time with memlog divided by the time without memlog.
    """
    faulty = [score for score in first if score.detected is not None]
    hits = [score for score in faulty if score.detected]
    alarms = sum(score.false_alarm for score in first)
    healthy = [score for score in (*first, *more) if score.detected is None]
    forecasts = [s.forecast_error for s in hits if s.forecast_error is not None]
    return Summary(
        recall=_share(len(hits), len(faulty)),
        precision=_share(len(hits), len(hits) + alarms),
        cause=_share(sum(bool(s.cause) for s in hits), len(hits)),
        best_cause=_share(sum(bool(s.best_cause) for s in hits), len(hits)),
        place=_share(sum(bool(s.place) for s in hits), len(hits)),
        rate_error=_median([s.rate_error for s in hits if s.rate_error is not None]),
        forecast_error=_median(forecasts),
        forecasts=len(forecasts),
        false_alarms=sum(score.false_alarm for score in healthy),
        healthy_runs=len(healthy),
        cost=_median(list(costs)),
    )


def _share(part: int, whole: int) -> float | None:
    return part / whole if whole else None


def _median(values: list[float]) -> float | None:
    return statistics.median(values) if values else None

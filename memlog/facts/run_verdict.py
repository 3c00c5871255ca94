"""Verdict on a run, and alerts about findings, for the training process: without the judging."""

from __future__ import annotations

from collections.abc import Callable
from typing import Literal

import msgspec

from memlog.events import OF_FINDING, Alert, Event, Finding
from memlog.findings import sentence

_FASTER = 2
"""A later finding of the same ``kind`` and ``where`` gets an alert only if its rate is at least this number
times the rate of the earlier finding."""


class RunVerdict(msgspec.Struct, frozen=True):
    """Verdict on a run's memory. Each surface that shows the run renders ``text`` as it is."""

    outcome: Literal["finding", "steady", "unsure", "too few steps"]
    text: str
    """One or two sentences. If the run ended badly, the end comes first."""
    rises: bool = False
    """True if memory rose, and nothing was found."""
    finding: Finding | None = None
    """Finding that the text tells."""
    parts: tuple[str, ...] = ()
    """Titles of findings about further causes of the same growth."""

    @property
    def growth(self) -> str | None:
        """The text, if it tells that memory grew or rose."""
        grew = self.rises or (self.finding is not None and self.finding.rate is not None)
        return self.text if grew else None


class FindingAlerts:
    """Subscriber that publishes an alert for each new finding.

    Trackers get these alerts and the alerts of rules in the same way. ``publish`` is called with each alert.
    """

    def __init__(
        self,
        publish: Callable[[Event], object],
    ) -> None:
        self._publish = publish
        self.findings: list[Finding] = []

    def __call__(self, event: Event) -> None:
        if not isinstance(event, Finding):
            return
        known = any(is_known(event, before) for before in self.findings)
        self.findings.append(event)
        if known:
            return
        self._publish(new_alert(event))


def is_known(finding: Finding, before: Finding) -> bool:
    """Return True if ``before`` has the same ``kind`` and ``where``, and the rate has not doubled since."""
    if (finding.kind, finding.where) != (before.kind, before.where):
        return False
    if finding.rate is None or finding.kind == "larger_steps":
        # Larger inputs alone can raise the rate of larger steps, so a higher rate of this kind is no news.
        return True
    return finding.rate < _FASTER * (before.rate or 0.0)


def new_alert(finding: Finding) -> Alert:
    """Return the alert about a finding."""
    return Alert(
        time_us=finding.time_us,
        step=finding.step,
        level="warning",
        rule=f"{OF_FINDING}{finding.kind}",
        title=sentence(finding),
        text=finding.remedy or "",
        value=finding.rate,
    )

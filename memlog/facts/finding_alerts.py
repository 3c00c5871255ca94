"""Alerts about findings, one for each new finding."""

from __future__ import annotations

from collections.abc import Callable

from memlog.events import OF_FINDING, Alert, Event, Finding
from memlog.findings import sentence

_FASTER = 2
"""A later finding of the same ``kind`` and ``where`` gets an alert only if its rate is at least this number
times the rate of the earlier finding."""


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

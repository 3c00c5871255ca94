"""Alerts about findings: one for each."""

from __future__ import annotations

from collections.abc import Callable

from memlog.events import OF_FINDING, Alert, Event, Finding

_FASTER = 2
"""Multiple of an alert's rate at which a finding about the same thing raises another alert."""


class FindingAlerts:
    """Subscriber that publishes an alert for each finding. Trackers get it like the alert of a rule.

    Args:
        publish: Takes the alerts.
        on_alert: Called with each alert after it was published.
        on_new: Called with each finding that is about something new.

    Attributes:
        findings: The findings so far.
    """

    def __init__(
        self,
        publish: Callable[[Event], object],
        on_alert: Callable[[Alert], object] = lambda _: None,
        on_new: Callable[[Finding], object] = lambda _: None,
    ) -> None:
        self._publish = publish
        self._on_alert = on_alert
        self._on_new = on_new
        self.findings: list[Finding] = []

    def __call__(self, event: Event) -> None:
        """Take one event."""
        if not isinstance(event, Finding):
            return
        known = any(_is_known(event, before) for before in self.findings)
        self.findings.append(event)
        if known:
            return
        self._on_new(event)
        alert = _alert(event)
        self._publish(alert)
        self._on_alert(alert)


def _is_known(finding: Finding, before: Finding) -> bool:
    """Return True if there was an alert about the same thing, and it does not grow twice as fast now."""
    if (finding.kind, finding.where) != (before.kind, before.where):
        return False
    if finding.rate is None or finding.kind == "larger_steps":
        # The rate of larger steps is the slope of a curve, which more steps make steeper.
        return True
    return finding.rate < _FASTER * (before.rate or 0.0)


def _alert(finding: Finding) -> Alert:
    # The reports are needed only if something was found.
    from memlog.reports.verdict import sentence  # noqa: PLC0415

    return Alert(
        time_us=finding.time_us,
        step=finding.step,
        level="warning",
        rule=f"{OF_FINDING}{finding.kind}",
        title=sentence(finding),
        text=finding.remedy or "",
        value=finding.rate,
    )

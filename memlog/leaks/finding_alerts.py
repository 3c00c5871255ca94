"""Alerts about findings, one for each new finding."""

from __future__ import annotations

from collections.abc import Callable

from memlog.events import OF_FINDING, Alert, Event, Finding

_FASTER = 2
"""A later finding of the same ``kind`` and ``where`` gets an alert only if its rate is at least this number
times the rate of the earlier finding."""


class FindingAlerts:
    """Subscriber that publishes an alert for each new finding.

    Trackers get these alerts and the alerts of rules in the same way. For a new finding, the subscriber calls
    ``on_new`` with the finding, then ``publish`` with the alert, then ``on_alert`` with the alert.
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
    """Return True if ``before`` has the same ``kind`` and ``where``, and the rate has not doubled since."""
    if (finding.kind, finding.where) != (before.kind, before.where):
        return False
    if finding.rate is None or finding.kind == "larger_steps":
        # Larger inputs alone can raise the rate of larger steps, so a higher rate of this kind is no news.
        return True
    return finding.rate < _FASTER * (before.rate or 0.0)


def _alert(finding: Finding) -> Alert:
    # Imported here, because the reports are needed only if there is a finding.
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

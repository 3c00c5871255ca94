"""Alerts about findings: one for each, in the tracker and to the user's function."""

from __future__ import annotations

from collections.abc import Callable

from memlog._internal.diagnostics import Diagnostics
from memlog._internal.terminal import say
from memlog.events import Alert, Event, Finding


class FindingAlerts:
    """Subscriber that publishes an alert for each finding, and prints the most important one at the end.

    Args:
        publish: Takes the alerts.
        diagnostics: Counts errors of ``on_alert``.
        on_alert: Called with each alert; ``None``: no function.
    """

    def __init__(
        self,
        publish: Callable[[Event], object],
        diagnostics: Diagnostics,
        on_alert: Callable[[Alert], object] | None,
    ) -> None:
        self._publish = publish
        self._diagnostics = diagnostics
        self._on_alert = on_alert
        self._findings: list[Finding] = []

    def __call__(self, event: Event) -> None:
        """Take one event."""
        if not isinstance(event, Finding):
            return
        known = any(_is_known(event, finding) for finding in self._findings)
        self._findings.append(event)
        if known:
            return
        # The reports are needed only if something was found.
        from memlog.reports.verdict import evidence_and_remedy, sentence  # noqa: PLC0415

        alert = Alert(
            time_us=event.time_us,
            step=event.step,
            level="warning",
            rule=f"memlog: {event.kind}",
            title=sentence(event),
            text=" ".join(f"{line.rstrip('.')}." for line in evidence_and_remedy(event)),
            value=event.rate,
        )
        self._publish(alert)
        if self._on_alert is not None:
            with self._diagnostics.contained_callback("on_alert"):
                self._on_alert(alert)

    def print_verdict(self) -> None:
        """Print the most important finding and its remedy; nothing if there is none."""
        if self._findings:
            from memlog.reports.verdict import ranked, sentence  # noqa: PLC0415 - as above

            finding = ranked(self._findings)[0]
            remedy = f" {finding.remedy}" if finding.remedy else ""
            say(f"{sentence(finding)}{remedy}")


def _is_known(finding: Finding, before: Finding) -> bool:
    """Return True if there was an alert about the same thing, and it does not grow twice as fast now."""
    same = (finding.kind, finding.where) == (before.kind, before.where)
    return same and (finding.rate is None or finding.rate < 2 * (before.rate or 0.0))

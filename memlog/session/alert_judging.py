"""Alerts of a run. The training process judges some rules; the helper process judges others."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence

from memlog._internal.diagnostics import Diagnostics
from memlog._internal.terminal import say
from memlog.alerts import engine_for, parse_rules
from memlog.bus import EventBus
from memlog.console import Console
from memlog.delivery.helper.alert_pipe import AlertListener
from memlog.events import Alert

_MAX_RULES = 5
"""Maximum number of rules that a printed line names."""


class AlertJudge:
    """Judge of the rules that the training process can judge, and receiver of the helper process's alerts.

    ``on_alert`` is called with every alert. ``files`` returns how many bytes of this process's resident set
    are pages of mapped files; ``None`` if unknown. ``listener`` receives the helper's alerts; it is ``None``
    if the helper judges no rule.
    """

    def __init__(
        self,
        alerts: Sequence[str],
        bus: EventBus,
        diagnostics: Diagnostics,
        console: Console,
        on_alert: Callable[[Alert], object],
        files: Callable[[], int | None],
    ) -> None:
        self._diagnostics = diagnostics
        self._console = console
        self._on_alert = on_alert
        rules = parse_rules(alerts)
        self._engine = engine_for(rules, bus.publish, diagnostics, os.getpid(), on_alert, files)
        if self._engine is not None:
            bus.subscribe(self._engine)
        self._helper_rules = tuple(rule.text for rule in rules if rule.sampled)
        self.listener: AlertListener | None = None
        if self._helper_rules:
            with diagnostics.contained("listening for the helper process's alerts"):
                self.listener = AlertListener(self._received, diagnostics)

    def close(self) -> None:
        if self.listener is not None:
            self.listener.close()

    def print_unjudged_rules(self, helper_is_away: bool) -> dict[str, str]:
        """Print the rules that were not judged, and why. Return the reasons by the text of the rule.

        ``helper_is_away`` is True if the helper process ended too early.
        """
        rules: dict[str, str] = {}
        with self._diagnostics.contained("looking for rules that were never judged"):
            rules = {} if self._engine is None else self._engine.never_judged()
            if rules:
                shown = _listed([f"{rule!r} ({why})" for rule, why in rules.items()])
                say(f"alert rules never judged in this run: {shown}")
            if helper_is_away and self._helper_rules:
                shown = _listed([repr(rule) for rule in self._helper_rules])
                say(f"alert rules no longer judged since the helper process ended: {shown}")
                why = "no longer, since the helper process ended"
                rules |= dict.fromkeys(self._helper_rules, why)
        return rules

    def _received(self, alert: Alert) -> None:
        with self._diagnostics.contained("printing"):
            self._console(alert)
        self._on_alert(alert)


def _listed(rules: Sequence[str]) -> str:
    more = f"; and {len(rules) - _MAX_RULES} more" if len(rules) > _MAX_RULES else ""
    return "; ".join(rules[:_MAX_RULES]) + more

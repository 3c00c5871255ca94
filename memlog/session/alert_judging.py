"""A run's alert rules in the trainer's process: what it judges itself, and what it is told."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence

from memlog._internal.diagnostics import Diagnostics
from memlog.alerts import engine_for, parse_rules
from memlog.bus import EventBus
from memlog.console import Console
from memlog.delivery.helper.alert_pipe import AlertListener
from memlog.events import Alert
from memlog.session.exit_messages import say_never_judged, say_no_longer_judged


class Judging:
    """Judges by the rules that this process can, and listens for what the helper finds by the others.

    Args:
        alerts: The rules.
        bus: Gives it events, and takes its alerts.
        diagnostics: Counts its errors.
        console: Prints the helper's alerts.
        on_alert: Gets every alert.
        files: As for `AlertEngine`.

    Attributes:
        listener: Hears of the helper's alerts; ``None`` where it judges by no rule.
    """

    def __init__(
        self,
        alerts: Sequence[str],
        bus: EventBus,
        diagnostics: Diagnostics,
        console: Console,
        on_alert: Callable[[Alert], object] | None,
        files: Callable[[], int | None],
    ) -> None:
        self._diagnostics = diagnostics
        self._console = console
        self._on_alert = on_alert
        rules = parse_rules(alerts)
        self._engine = engine_for(rules, bus.publish, diagnostics, os.getpid(), on_alert, files)
        if self._engine is not None:
            bus.subscribe(self._engine)
        self._of_the_helper = tuple(rule.text for rule in rules if rule.sampled)
        self.listener: AlertListener | None = None
        if self._of_the_helper:
            with diagnostics.contained("listening for the helper process's alerts"):
                self.listener = AlertListener(self._told, diagnostics)

    def close(self) -> None:
        """Gives back what nobody listens to."""
        if self.listener is not None:
            self.listener.close()

    def say_what_was_not_judged(self, helper_is_away: bool) -> dict[str, str]:
        """Names rules of which nothing is known, and says why: silence would pass for all being well.

        Args:
            helper_is_away: Whether the process that judges by some of them has ended too early.
        """
        rules: dict[str, str] = {}
        with self._diagnostics.contained("looking for rules that were never judged"):
            rules = {} if self._engine is None else self._engine.never_judged()
            say_never_judged(rules)
            if helper_is_away:
                why = say_no_longer_judged(self._of_the_helper)
                rules |= dict.fromkeys(self._of_the_helper, why)
        return rules

    def _told(self, alert: Alert) -> None:
        with self._diagnostics.contained("printing"):
            self._console(alert)
        if self._on_alert is not None:
            with self._diagnostics.contained_callback("on_alert"):
                self._on_alert(alert)

"""When a rule fires: once as its threshold is crossed, and not again while the value hovers there."""

from __future__ import annotations

from memlog.alerts.rules import Rule

HYSTERESIS = 0.05
"""Part of the threshold by which a value has to come back before the rule can fire again."""


class Trigger:
    """One rule's state for one series of values.

    It fires at the first value beyond the threshold (for ``hold`` steps, where the rule says so), and is
    then silent until a value was clearly on the good side again, and for ``cooldown_us`` in any case.

    Args:
        rule: Says the direction and for how long it has to hold.
        threshold: In the values' unit.
        cooldown_us: Between two alerts, by the events' own time.
    """

    __slots__ = (
        "_armed",
        "_cooldown_us",
        "_fired_us",
        "_hold",
        "_inclusive",
        "_line",
        "_rearm",
        "_sign",
        "_since",
    )

    def __init__(self, rule: Rule, threshold: float, cooldown_us: int) -> None:
        # A rule that warns of low values is one that warns of high ones with the signs changed.
        self._sign = 1 if rule.upward else -1
        self._line = self._sign * threshold
        self._rearm = self._line - HYSTERESIS * abs(threshold)
        self._inclusive = rule.comparison in (">=", "<=")
        self._hold = rule.hold
        self._cooldown_us = cooldown_us
        self._armed = True
        self._since: int | None = None
        self._fired_us: int | None = None

    def fires(self, value: float, index: int | None, time_us: int) -> bool:
        """Takes the next value; says whether that is an alert.

        Args:
            value: Of the figure that the rule is about.
            index: The step that it belongs to; ``None``: it lies on another axis.
            time_us: The event's own time, Unix time in microseconds.
        """
        value *= self._sign
        if value < self._line or (value == self._line and not self._inclusive):
            self._since = None
            self._armed = self._armed or value <= self._rearm
            return False
        if not self._armed or (self._hold > 1 and not self._has_held(index)):
            return False
        if self._fired_us is not None and 0 <= time_us - self._fired_us < self._cooldown_us:
            return False
        self._armed = False
        self._fired_us = time_us
        return True

    def has_fired(self, time_us: int) -> None:
        """It did, at that time, before a new helper process began to judge."""
        self._armed, self._fired_us = False, time_us

    def _has_held(self, index: int | None) -> bool:
        if index is None:
            return False
        if self._since is None or index < self._since:
            self._since = index
        return index - self._since + 1 >= self._hold

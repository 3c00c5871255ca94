"""Decision whether a rule fires."""

from __future__ import annotations

from memlog.alerts.rules import Rule

HYSTERESIS = 0.05
"""Fraction of the threshold. Before a rule can fire again, a value must lie on the harmless side of the
threshold, at least this fraction away from the threshold."""


class Trigger:
    """State of one rule for the values of the host or of one device.

    The rule fires at the first value beyond the threshold. If ``rule.hold`` is N > 1, the rule fires when the
    values have been beyond the threshold for N steps. ``threshold`` is in the values' unit.

    Two things must happen before the rule fires again. A value returns to the harmless side of the threshold
    (`HYSTERESIS`). The events' timestamps advance by ``cooldown_us`` microseconds.
    """

    def __init__(self, rule: Rule, threshold: float, cooldown_us: int) -> None:
        # A rule that warns of low values is judged with all signs changed.
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
        """Take the next value; return whether it raises an alert.

        ``index`` is the value's step; ``None``: the value belongs to no step. ``time_us`` is the event's Unix
        time in microseconds.
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

    def _has_held(self, index: int | None) -> bool:
        if index is None:
            return False
        if self._since is None or index < self._since:
            self._since = index
        return index - self._since + 1 >= self._hold

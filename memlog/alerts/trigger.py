"""Decision whether an alert rule fires, and whether a figure has grown enough for rules with ``grows``.

A level is the value of a rule's figure at a step or epoch, such as the bytes of ``host.rss`` at step 120.
"""

from __future__ import annotations

from itertools import islice
from typing import NamedTuple

from memlog.alerts.rules import Rule
from memlog.growth import FEW, JOINED, MAX_LEVELS, LevelScales, LevelWindow, keeps_growing, trend

LEAST_STEPS = 20
"""Growth is judged over at least this many steps, even if the rule names fewer. Over fewer steps, growth in
warm-up would raise an alarm."""
LEAST_EPOCHS = 3
_LONGER = 2
"""Number of windows that are longer than the rule needs. Longer windows also show growth in large, rare jumps
and growth with much noise."""
_LOOKS = 8
"""After judging N levels of a window, memlog waits for N / `_LOOKS` new levels before it judges the window
again."""
_OVER = 0.5
"""Growth below this fraction of a rule's threshold counts as no growth."""
_GARBAGE = 0.25
"""If a garbage collection frees less than this fraction of the growth, memlog reports the whole growth.
Otherwise memlog subtracts the freed bytes."""
_LARGER = 2
"""If growth gets faster by this factor after an alarm, memlog raises another alarm, even in the cooldown."""


class _Look(NamedTuple):
    """Growth of the newest levels in one window of a `GrowthMeter`."""

    pace: float
    """Growth per epoch or step."""
    level: float
    """Level at the window's end, in bytes or as a ratio."""
    span: float
    """Epochs or steps that the window covers."""
    lasts: bool
    """True if the level grew throughout the window, and at least as fast as the rule requires."""


_NOTHING = _Look(0.0, 0.0, 0.0, lasts=False)


class _Alarm(NamedTuple):
    """Growth that raised an alarm."""

    pace: float
    window: int
    """Index of the window that showed the growth; 0 is the shortest window."""
    time_us: int


class GrowthMeter:
    """State of one rule for the levels of the host or of one device.

    Windows of several lengths hold the levels. The number of levels in each window is bounded. A window is
    judged when the window covers enough steps or epochs for the rule. All windows are cleared after an alarm
    and when growth ends, so the next alarm is about later growth.

    ``threshold`` is the growth that raises an alarm, in the unit of the levels. The cooldown is the time of
    ``cooldown_us`` microseconds after an alarm. During the cooldown, only growth that is much faster or
    reaches a clearly higher level raises another alarm.
    """

    def __init__(self, rule: Rule, threshold: float, cooldown_us: int) -> None:
        self._every = every = 1 if rule.growth is None else rule.growth.every
        self._wanted = threshold / self._every
        self._inclusive = rule.comparison == ">="
        self._cooldown_us = cooldown_us
        self._axis = rule.held_axis
        if self._axis == "epoch":
            # `for N epochs` means N rises, which lie between N + 1 epochs.
            self._reach = max(every, LEAST_EPOCHS, rule.hold + 1)
        else:
            self._reach = max(every, LEAST_STEPS, rule.hold)
        needed = 1
        while MAX_LEVELS * JOINED ** (needed - 1) < self._reach:
            needed += 1
        self._levels = LevelScales(needed + _LONGER)
        self._first: int | None = None
        self._last = 0
        self._before = 0.0
        self._alarm: _Alarm | None = None
        self._active = False
        self._highest = 0.0
        self._alarm_before: _Alarm | None = None
        self._span = 0.0
        self._collected: tuple[int, int] | None = None
        self.judged = False
        """True as soon as a window has been judged."""

    def take(self, level: float, index: int, time_us: int) -> float | None:
        """Judge the level at the epoch or step ``index``. Return ``None`` if the level raises no alarm.

        If the level raises an alarm, return the growth over the rule's number of epochs or steps.
        ``time_us`` is the event's Unix time in microseconds.
        """
        if self._first is None:
            self._first = index
        elif index == self._last:  # the helper process may sample several times within one step
            self._levels.finest.lower(level)
            return None
        elif index < self._last:
            self._levels.clear()
        if self._active:  # a level counts as reached if two consecutive readings show it
            self._highest = max(self._highest, min(level, self._before))
        self._last, self._before = index, level
        for number, window in enumerate(self._levels.add(index, level)):
            look = self._look(window, LEAST_STEPS if number else min(FEW, self._reach))
            if look is not None:
                self.judged = True
                if self._is_news(look, number, time_us):
                    return look.pace * self._every
        return None

    def without_garbage(self, freed: int, left: int) -> float | None:
        """Return the last alarm's growth without garbage, over the rule's number of epochs or steps.

        A garbage collection has just freed ``freed`` bytes. Now ``left`` bytes are in use. If the growth
        without garbage is too small for an alarm, withdraw the alarm and return ``None``.

        The freed garbage can be older than the growth. Subtracting old garbage could hide a leak. So the
        result of a subtraction is at least the growth since the previous garbage collection.
        """
        before, self._collected = self._collected, (self._last, left)
        pace = 0.0 if self._alarm is None else self._alarm.pace
        if freed < _GARBAGE * pace * self._span:
            return pace * self._every
        pace -= freed / self._span
        if before is not None and before[0] < self._last:
            pace = max(pace, (left - before[1]) / (self._last - before[0]))
        if pace < self._wanted or (pace == self._wanted and not self._inclusive):
            # As if there had been no alarm, because its growth was garbage.
            self._alarm, self._active = self._alarm_before, False
            return None
        return pace * self._every

    def why_not_judged(self) -> str:
        """Return the reason why the rule was never judged: too few steps or epochs, or too few readings."""
        seen = 0 if self._first is None else self._last - self._first + 1
        least = f"fewer than {self._reach} {self._axis}s came"
        return least if seen < self._reach else f"it was read fewer than {FEW} times"

    def _is_news(self, look: _Look, window: int, time_us: int) -> bool:
        alarm = self._alarm
        if self._active and alarm is not None:
            if window == alarm.window and look.pace < _OVER * self._wanted:
                self._active = False
                self._levels.clear()
                return False
            if look.pace < _LARGER * alarm.pace:
                return False
        if not look.lasts or (look.pace == self._wanted and not self._inclusive):
            return False
        if alarm is not None and not self._active and not self._is_another(look, alarm, time_us):
            return False
        self._alarm_before, self._alarm = alarm, _Alarm(look.pace, window, time_us)
        self._span = look.span
        self._active = True
        self._highest = look.level
        self._levels.clear()
        return True

    def _is_another(self, look: _Look, alarm: _Alarm, time_us: int) -> bool:
        """Return True if ``look`` is reason enough for another alarm after ``alarm``.

        One of these is enough: the cooldown is over, the level is clearly above the highest level of the
        earlier growth, or the growth is much faster than the earlier growth.
        """
        # If the system's clock was set back, the cooldown must not last until the clock catches up.
        cooled = not 0 <= time_us - alarm.time_us < self._cooldown_us
        higher = look.level > self._highest + _OVER * self._wanted * look.span
        return cooled or higher or look.pace >= _LARGER * alarm.pace

    def _look(self, window: LevelWindow, least: int) -> _Look | None:
        """Judge a window's newest levels.

        Return ``None`` if the window has too few levels, or too few new levels since the last judgement.
        ``least`` is the minimum number of levels.

        If no alarm is active and the level hardly rose, report no growth without the slow, full judgement.
        """
        held = len(window.levels)
        if held < least:
            return None
        spacing = (window.indexes[-1] - window.indexes[0]) / (held - 1)
        count = max(least, int(self._reach / spacing))
        if held < count or window.unseen < count // _LOOKS:
            return None
        window.unseen = 0
        span = count * spacing
        rise = window.levels[-1] - window.levels[-count]
        if not self._active and rise < _OVER * self._wanted * span:
            return _NOTHING
        levels = list(islice(window.levels, held - count, None))
        measured = trend(levels)
        wanted = self._wanted * spacing
        lasts = measured.pace >= wanted and keeps_growing(levels, wanted)
        return _Look(measured.pace / spacing, measured.level, span, lasts)


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
        # If the system's clock was set back, the rule fires again at once.
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

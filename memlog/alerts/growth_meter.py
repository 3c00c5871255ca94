"""Rules that say ``grows``: which levels are judged, when, and which growth is an alarm of its own."""

from __future__ import annotations

from collections import deque
from itertools import islice
from typing import NamedTuple

from memlog.alerts.rules import Rule
from memlog.growth import FEW, keeps_growing, trend

LEAST_STEPS = 20
"""Steps that a rule is judged by at least: growth has to outlast warm-up."""
LEAST_EPOCHS = 3
_MOST = 128
"""Levels that a window holds at most."""
_JOINED = 4
"""Levels of a window of which the lowest is one level of the next, longer window."""
_LONGER = 2
"""Windows that are longer than the rule names: they show growth that comes in stairs, or in noise."""
_LOOKS = 8
"""How often a window is judged while all its levels are replaced once."""
_OVER = 0.5
"""Share of a rule's growth below which growth is over."""
_GARBAGE = 0.25
"""Share of a growth from which on what a collection frees may be its cause."""
_LARGER = 2
"""Times as fast as the last alarm's growth, from which on growth is an alarm of its own."""


class _Look(NamedTuple):
    """What a window shows."""

    pace: float
    """Growth per epoch or step."""
    level: float
    """At its end."""
    span: float
    """Epochs or steps that it covers."""
    lasts: bool
    """Whether it grew throughout, as fast as the rule names."""


_NOTHING = _Look(0.0, 0.0, 0.0, lasts=False)


class _Alarm(NamedTuple):
    """The last growth that was an alarm."""

    pace: float
    window: int
    """The number of the window that showed it."""
    time_us: int


class GrowthMeter:
    """One rule's state for one series of levels.

    Windows of several lengths hold the levels; the first that can covers as much as the rule names. So
    memory is bounded, whatever that is. All of them begin anew after an alarm, and when growth is over: the
    next alarm is of what came since.

    Args:
        rule: A rule with a `Growth`.
        threshold: The growth that it names, in the levels' unit.
        cooldown_us: Time after an alarm in which growth is another one only if it is much faster, or leads
            above the level that had been reached then.
    """

    def __init__(self, rule: Rule, threshold: float, cooldown_us: int) -> None:
        self._every = 1 if rule.growth is None else rule.growth.every
        self._wanted = threshold / self._every
        self._inclusive = rule.comparison == ">="
        self._cooldown_us = cooldown_us
        self._axis = rule.held_axis
        self._reach = _reach(rule)
        scales = _LONGER
        while _MOST * _JOINED ** (scales - _LONGER) < self._reach:
            scales += 1
        finest = _Window(self._reach, min(FEW, self._reach))
        self._windows = [finest, *(_Window(self._reach, LEAST_STEPS) for _ in range(scales))]
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
        """Whether there were enough levels once."""

    def take(self, level: float, index: int, time_us: int) -> float | None:
        """Takes the level at an epoch or step; says which growth is an alarm, if any.

        Args:
            level: Of the figure that the rule is about.
            index: The epoch's or step's number.
            time_us: The event's own time, Unix time in microseconds.

        Returns:
            Growth in as many epochs or steps as the rule names.
        """
        if self._first is None:
            self._first = index
        elif index == self._last:  # looked at from outside several times in one step
            self._windows[0].lower(level)
            return None
        elif index < self._last:
            self._begin_anew()
        if self._active:  # one spike alone is no level that was reached
            self._highest = max(self._highest, min(level, self._before))
        self._last, self._before = index, level
        joined: float | None = level
        for number, window in enumerate(self._windows):
            if joined is None:
                break
            window.add(index, joined)
            look = window.look(self._wanted, cursory=not self._active)
            if look is not None:
                self.judged = True
                if self._is_news(look, number, time_us):
                    return look.pace * self._every
            joined = window.joined()
        return None

    def without_garbage(self, freed: int, left: int) -> float | None:
        """What the last alarm's growth is without garbage; takes the alarm back if that is too little.

        Garbage may be much, and hide a leak beside it: so what two collections leave is compared, too.

        Args:
            freed: Bytes that collecting has just freed.
            left: Bytes that are in use after it.

        Returns:
            Growth in as many epochs or steps as the rule names; ``None``: it was no alarm.
        """
        before, self._collected = self._collected, (self._last, left)
        pace = 0.0 if self._alarm is None else self._alarm.pace
        if freed < _GARBAGE * pace * self._span:
            return pace * self._every
        pace -= freed / self._span
        if before is not None and before[0] < self._last:
            pace = max(pace, (left - before[1]) / (self._last - before[0]))
        if pace < self._wanted or (pace == self._wanted and not self._inclusive):
            self._alarm, self._active = self._alarm_before, False
            return None
        return pace * self._every

    def why_not_judged(self) -> str:
        """Why there were never enough levels."""
        seen = 0 if self._first is None else self._last - self._first + 1
        least = f"fewer than {self._reach} {self._axis}s came"
        return least if seen < self._reach else f"it was read fewer than {FEW} times"

    def _is_news(self, look: _Look, window: int, time_us: int) -> bool:
        alarm = self._alarm
        if self._active and alarm is not None:
            if window == alarm.window and look.pace < _OVER * self._wanted:
                self._active = False
                self._begin_anew()
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
        self._begin_anew()
        return True

    def _is_another(self, look: _Look, alarm: _Alarm, time_us: int) -> bool:
        """Whether growth that began after the last alarm's was over is more than the same swing again."""
        cooled = not 0 <= time_us - alarm.time_us < self._cooldown_us
        higher = look.level > self._highest + _OVER * self._wanted * look.span
        return cooled or higher or look.pace >= _LARGER * alarm.pace

    def _begin_anew(self) -> None:
        for window in self._windows:
            window.clear()


def _reach(rule: Rule) -> int:
    """Epochs or steps that a rule is judged by: as many as it names, and no fewer than show a trend."""
    every = 1 if rule.growth is None else rule.growth.every
    if (
        rule.held_axis == "epoch"
    ):  # those of which it is to hold are the rises between so many and one
        return max(every, LEAST_EPOCHS, rule.hold + 1)
    return max(every, LEAST_STEPS, rule.hold)


class _Window:
    """The newest levels at one scale.

    Args:
        reach: Epochs or steps that have to be covered.
        least: Levels that are judged at least.
    """

    __slots__ = ("_added", "_indexes", "_least", "_levels", "_reach", "_unseen")

    def __init__(self, reach: int, least: int) -> None:
        self._reach = reach
        self._least = least
        self._indexes: deque[int] = deque(maxlen=_MOST)
        self._levels: deque[float] = deque(maxlen=_MOST)
        self.clear()

    def clear(self) -> None:
        """Forgets all levels."""
        self._indexes.clear()
        self._levels.clear()
        self._added = 0
        self._unseen = _MOST

    def add(self, index: int, level: float) -> None:
        """Takes the next level."""
        self._indexes.append(index)
        self._levels.append(level)
        self._added += 1
        self._unseen += 1

    def lower(self, level: float) -> None:
        """Takes another reading of the newest level: the lowest counts."""
        if self._levels:
            self._levels[-1] = min(self._levels[-1], level)

    def joined(self) -> float | None:
        """The level of the next window that is complete with the newest one; ``None``: none is."""
        if not self._added or self._added % _JOINED:
            return None
        return min(islice(reversed(self._levels), _JOINED))

    def look(self, wanted: float, *, cursory: bool) -> _Look | None:
        """Judges the newest levels; ``None`` if too few are there, or if it has just been done.

        Args:
            wanted: Growth per epoch or step.
            cursory: Look no further if the newest level is hardly above the oldest: most steps end here.
        """
        held = len(self._levels)
        if held < self._least:
            return None
        spacing = (self._indexes[-1] - self._indexes[0]) / (held - 1)
        count = max(self._least, int(self._reach / spacing))
        if held < count or self._unseen < count // _LOOKS:
            return None
        self._unseen = 0
        span = count * spacing
        if cursory and self._levels[-1] - self._levels[-count] < _OVER * wanted * span:
            return _NOTHING
        levels = list(islice(self._levels, held - count, None))
        found = trend(levels)
        lasts = found.pace >= wanted * spacing and keeps_growing(levels, wanted * spacing)
        return _Look(found.pace / spacing, found.level, span, lasts)

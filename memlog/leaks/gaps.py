"""A series of levels without the steps in which memlog's own search took memory."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from statistics import median
from typing import NamedTuple

from memlog.growth import Growth

_ENOUGH = 12
"""Levels after a gap that are enough to continue the series without the gap."""

_JOINED = 6
"""Levels on either side of a gap that are compared."""


class Level(NamedTuple):
    """Level at the end of a step, in bytes."""

    step: int
    level: int


class Gaps:
    """Gaps in a series. The levels after a gap continue those before it, in step and level.

    A search for holders takes tens of megabytes and leaves some of them to the allocator, in which the
    program's growth then disappears for a while. So what happened in a gap counts neither for growth nor
    against it, unless the series ends soon after.
    """

    def __init__(self) -> None:
        self._shift = Level(0, 0)
        """Steps and bytes to subtract from a level that was measured."""
        self._begins = [(0, 0)]
        """Steps from which shifts hold, and the shifts' steps."""
        self._newest: deque[Level] = deque(maxlen=_JOINED)
        """The newest levels before the gap, without gaps."""
        self._waiting: list[Level] = []
        """Levels of a gap and after it."""
        self._after = 0

    def take(self, step: int, level: int, *, left_out: bool) -> Sequence[Level]:
        """Take a level; return those that have become certain, without the gaps.

        Args:
            step: Number of the step.
            level: Bytes at its end.
            left_out: True if the step belongs to a gap.
        """
        newest = Level(step, level)
        if not self._waiting and not (left_out and self._newest):
            return [self._shifted(newest)]
        self._waiting.append(newest)
        self._after = 0 if left_out else self._after + 1
        if self._after < _ENOUGH:
            return []
        return self._close(self._waiting[-_ENOUGH:])

    def rest(self) -> Sequence[Level]:
        """Return the levels of a gap, if the series ends in it or soon after."""
        return [self._shifted(each) for each in self._waiting]

    def measured(self, growth: Growth) -> Growth:
        """Return growth that was found in levels without gaps, with its true first step and level."""
        steps = next(steps for begin, steps in reversed(self._begins) if begin <= growth.since)
        return growth._replace(since=growth.since + steps, level=growth.level + self._shift.level)

    def _close(self, after: list[Level]) -> list[Level]:
        """Close the gap: shift the levels after it, so that the first of them match the last ones before it.

        Medians of both are compared, because a single level may be a spike, which would look like a jump.
        """
        count = len(self._newest)
        before = median(each.level for each in self._newest)
        level = median(each.level for each in after[:count])
        begin = self._newest[-1].step
        self._shift = Level(after[count - 1].step - begin, int(level - before))
        self._begins.append((begin, self._shift.step))
        self._waiting = []
        return [self._shifted(each) for each in after[count:]]

    def _shifted(self, measured: Level) -> Level:
        shifted = Level(measured.step - self._shift.step, measured.level - self._shift.level)
        self._newest.append(shifted)
        return shifted

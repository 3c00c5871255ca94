"""Series of memory levels without the steps in which memlog's own search took memory."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from statistics import median
from typing import NamedTuple

from memlog.growth.regime import Growth

_ENOUGH = 12
"""Number of levels that must follow a gap before the gap is removed from the series."""

_JOINED = 6
"""Number of levels before a gap, and of levels after the gap, whose medians are compared."""


class StepLevel(NamedTuple):
    """Level at the end of a step, in bytes."""

    step: int
    level: int


class Gaps:
    """Remover of gaps from a series. A gap is a sequence of steps in which memlog's own search took memory.

    Each level after a gap is shifted: a number of steps and a number of bytes are subtracted. The shifted
    levels continue the levels before the gap.

    A search for holders takes tens of megabytes and leaves some of them free in the allocator. The program's
    growth then fills this free memory, and can't be seen for a while. So the levels in a gap are left out,
    except if the series ends in the gap or soon after it.
    """

    def __init__(self) -> None:
        self._shift = StepLevel(0, 0)
        """Steps and bytes to subtract from a measured level."""
        self._begins = [(0, 0)]
        """Pairs ``(step, count)``. From the shifted step ``step`` on, measured steps are larger by ``count``.
        The first pair is for the start of the series. Each further pair is for a gap."""
        self._newest: deque[StepLevel] = deque(maxlen=_JOINED)
        """The newest levels, minus `_shift`. During a gap, these are the last levels before the gap."""
        self._waiting: list[StepLevel] = []
        """Measured levels of the current gap and of the steps after the gap, until the gap is closed."""
        self._after = 0

    def take(self, step: int, level: int, *, left_out: bool) -> Sequence[StepLevel]:
        """Take a measured level. Return the levels that can be judged now. These levels have no gaps.

        ``left_out`` is true if the step belongs to a gap.
        """
        newest = StepLevel(step, level)
        if not self._waiting and not (left_out and self._newest):
            if len(self._begins) == 1:  # most series have no gap, and so no shift
                self._newest.append(newest)
                return (newest,)
            return [self._shifted(newest)]
        self._waiting.append(newest)
        self._after = 0 if left_out else self._after + 1
        if self._after < _ENOUGH:
            return []
        return self._close(self._waiting[-_ENOUGH:])

    def rest(self) -> Sequence[StepLevel]:
        """Return the levels that wait for the end of a gap. Call this method when the series may end.

        Later levels are not shifted because of this gap.
        """
        waiting, self._waiting = self._waiting, []
        return [self._shifted(each) for each in waiting]

    def measured(self, growth: Growth) -> Growth:
        """Undo the shift: return ``growth`` with its measured first step and its measured level."""
        steps = next(steps for begin, steps in reversed(self._begins) if begin <= growth.since)
        return growth._replace(since=growth.since + steps, level=growth.level + self._shift.level)

    def _close(self, after: list[StepLevel]) -> list[StepLevel]:
        """Compute the shift that closes the gap. Return the shifted levels after the gap.

        The shift is the difference of two medians: the median of the first levels after the gap, minus the
        median of the last levels before the gap. Single levels are not compared, because they can be spikes.
        """
        count = len(self._newest)
        before = median(each.level for each in self._newest)
        level = median(each.level for each in after[:count])
        begin = self._newest[-1].step
        self._shift = StepLevel(after[count - 1].step - begin, int(level - before))
        self._begins.append((begin, self._shift.step))
        self._waiting = []
        return [self._shifted(each) for each in after[count:]]

    def _shifted(self, measured: StepLevel) -> StepLevel:
        shifted = StepLevel(measured.step - self._shift.step, measured.level - self._shift.level)
        self._newest.append(shifted)
        return shifted

"""Axis of the user's own step numbers in a tracker's run, such as frames or samples.

The points of a run go on from the user's numbers, so that memory and losses stand at the same places. A
program may log on several axes, for example each loss by iteration and once more by samples.
"""

from __future__ import annotations

from collections.abc import Mapping

from memlog.metrics import bucket_start

_PATIENCE = 3
"""Number of readings in a row on another axis after which it is the user's axis, if one was known before."""
_FEW = 4
"""Largest number of different numbers since the last step of which one may be an optimizer step. Among many
frames, one equals memlog's step by chance."""
_ON_A_LINE = 3
"""Number of readings in a row with one and the same distance to memlog's steps that show an axis of optimizer
steps. Two readings of many frames can have one distance in common by chance."""


class UsersAxis:
    """Amount by which the user's numbers in one run are ahead of memlog's steps.

    If some numbers rise by one per optimizer step, their axis is the one. Otherwise it is the axis of the
    number at which the user logged most since the last step. Numbers behind memlog's steps, such as epochs,
    change nothing, unless a run goes on from a checkpoint that is older than its last step. A single number
    on another axis changes nothing if an axis was known before it.
    """

    def __init__(self) -> None:
        self._ahead = self._told = 0
        self._bucket = -1
        self._since = 0
        """Number at which the present axis was last seen."""
        self._has_steps = False
        """True if the user's numbers include those of optimizer steps."""
        self._against = 0
        self._lines: dict[int, int] = {}
        """Number of readings in a row that had a number with this distance to memlog's step."""

    def number_to_tell(self, own: int, position: int, counts: Mapping[int, int]) -> int | None:
        """Return the number of a step, if the steps no longer go on from the last number that was told.

        Numbers are told at most as often as a metric gets points (`memlog.metrics.bucket_start`).

        Args:
            own: memlog's number of the step in the run.
            position: Number of steps since the session's first step.
            counts: How often the user logged at each number since the last step.
        """
        if counts:
            self._move(own, counts, goes_on=own > position)
        if self._ahead == self._told:
            return None
        bucket = bucket_start(max(position, 0))
        if bucket == self._bucket:
            return None
        self._told, self._bucket = self._ahead, bucket
        return own + self._ahead

    def _move(self, own: int, counts: Mapping[int, int], *, goes_on: bool) -> None:
        self._lines = {number - own: self._lines.get(number - own, 0) + 1 for number in counts}
        found = self._of_steps(own, counts, goes_on=goes_on)
        if found is None:
            found = self._of_most(own, counts)
        else:
            self._has_steps, self._against = True, 0
            # A program may log a step's number before the step and after it.
            if found <= own + self._ahead <= found + 1:
                found = None
        if found is not None:
            self._ahead, self._since = found - own, found

    def _of_steps(self, own: int, counts: Mapping[int, int], *, goes_on: bool) -> int | None:
        """Return the user's number of an optimizer step; ``None`` if no number is one.

        ``goes_on``: True if an earlier process has written to the run.
        """
        if own == 0 or len(counts) > _FEW:
            return None
        found = [
            number
            for number in counts
            # Behind another axis, one of the numbers of epochs or frames equals memlog's step by chance.
            if (abs(number - own) <= 1 and not self._ahead)
            or self._lines[number - own] >= _ON_A_LINE
        ]
        if not found:
            return None
        # The steps after the checkpoint are made again.
        is_behind = goes_on and not self._has_steps
        return max(found) if is_behind else max(own + min(self._ahead, 0), *found)

    def _of_most(self, own: int, counts: Mapping[int, int]) -> int | None:
        """Return the number at which the user logged most, if the steps are to go on from it."""
        number = max(counts, key=lambda each: (counts[each], each))
        # Before the first step, 0 and another number are a line that is drawn for comparison.
        if number <= own or (own == 0 and counts.keys() == {0, number}):
            return None
        if self._since <= number <= own + self._ahead:
            self._against = 0
            return None
        if self._has_steps or number < self._since:
            self._against += 1
            if self._against < _PATIENCE:
                return None
        self._has_steps, self._against = False, 0
        return number

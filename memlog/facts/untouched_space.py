"""Address space that the process has taken and never written to, such as the empty part of a buffer.

Memory can rise while the process takes no address space for it: the program writes into a buffer that it has
allocated before, for example into ``np.zeros((100000, 800))``, row after row. This is no leak. The address
space without the memory in it then falls by as much as the memory rises. If the program keeps something new,
both rise, and the difference stays the same, also while memlog's own search takes memory and gives it back.
"""

from __future__ import annotations

from collections.abc import Iterable
from statistics import median

from memlog.events import HOST_ANON, SHARED, Reading
from memlog.growth.windows import LevelScales

_SCALES = 6
"""Number of windows: the longest covers 131,072 steps."""
_FILLED = 0.6
"""Minimum part of a rise that must have filled such space. Meanwhile, the process can take other space that
it does not use at once."""
_JOINED = 3
"""Number of levels at each end of an interval whose medians are compared."""


class UntouchedSpace:
    """Fold of the bytes of address space that are not in use, after each step, in bounded memory."""

    def __init__(self) -> None:
        self._series = {HOST_ANON: LevelScales(_SCALES), SHARED: LevelScales(_SCALES)}

    def take(self, step: int, found: Iterable[Reading]) -> None:
        """Add the readings of a step."""
        for each in found:
            if each.space is None or each.level is None:
                continue
            series = self._series[each.name]
            if series.finest.indexes and step <= series.finest.indexes[-1]:
                series.clear()  # the program's count of steps has begun again
            series.add(step, each.space - each.level)

    def is_filled(self, name: str, rate: float, since: int) -> bool:
        """Return True if a rise of ``rate`` bytes per step since step ``since`` has filled such space.

        ``name`` is ``HOST_ANON`` or ``SHARED``. The result is False if that is not known.
        """
        series = self._series.get(name)
        window = None if series is None else series.covering(since, 2 * _JOINED)
        if window is None:
            return False
        pairs = zip(window.indexes, window.levels, strict=True)
        known = [(step, level) for step, level in pairs if step >= since]
        if len(known) < 2 * _JOINED:
            return False
        (begin, before), (end, after) = (
            (median(step for step, _ in each), median(level for _, level in each))
            for each in (known[:_JOINED], known[-_JOINED:])
        )
        risen = rate * (end - begin)
        return before - after >= _FILLED * risen > 0

"""A long series in bounded memory, for a small chart."""

from __future__ import annotations

from itertools import pairwise

_MOST = 240
"""Maximum number of intervals. If there are more, every two neighbours become one interval."""
_SHOWN = 120
"""Maximum number of values that `History.values` returns."""


class History:
    """Highest value of each interval of a series; all intervals have the same length."""

    def __init__(self) -> None:
        self._length = 1
        self._highest: list[int] = []
        self._in_last = 0

    def add(self, value: int) -> None:
        if self._highest and self._in_last < self._length:
            self._highest[-1] = max(self._highest[-1], value)
            self._in_last += 1
            return
        if len(self._highest) >= _MOST:
            # All intervals are complete, and their number is even.
            self._highest = highest_of(self._highest, _MOST // 2)
            self._length *= 2
        self._highest.append(value)
        self._in_last = 1

    def values(self) -> list[int]:
        """Return at most `_SHOWN` values, in order."""
        return highest_of(self._highest, _SHOWN)


def highest_of(values: list[int], count: int) -> list[int]:
    """Split values into ``count`` equal parts and return the highest value of each part.

    If there are at most ``count`` values, return all values.
    """
    if len(values) <= count:
        return list(values)
    edges = [round(at * len(values) / count) for at in range(count + 1)]
    return [max(values[first:last]) for first, last in pairwise(edges)]

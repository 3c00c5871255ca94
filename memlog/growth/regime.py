"""The newest regime of a series of levels: its first index, its rate of growth, and the rate's interval.

1. *Regime.* A line is fitted to the newest half of the levels. Older levels are added group by group, as long
   as the group's median lies near the line. A jump or the end of a warm-up is a change point. The levels
   before a change point are left out.
2. *Rate and interval* (`memlog.growth.lasting`). They are computed from the regime's levels alone.
3. *Decision.* The regime counts as growing if all of these are true:

   - The levels grow throughout the regime (`memlog.growth.lasting`).
   - The rate's interval lies well above zero.
   - The second half of the levels grows at least 0.7 times as fast as the first half.
   - The rate is at least the required rate.
"""

from __future__ import annotations

from collections.abc import Sequence
from statistics import median
from typing import NamedTuple

from memlog.growth.lasting import BLOCKS, SIGMAS, Line, keeps_growing, line_through

_FADING = 0.7
"""Factor. The growth fades if the second half's rate is less than this factor times the first half's rate."""
_GROUPS = 16
"""Number of groups into which the levels are divided to find the change point."""
_NEAR = 3.0
"""Maximum distance of the median of a group of levels from the regime's line, in multiples of the levels'
spread around the line. A group at a larger distance does not belong to the regime. For older groups, the
maximum is larger, because the line's slope is uncertain."""


class Growth(NamedTuple):
    """Growth of levels in their newest regime. Rates are per unit of the index, usually per step."""

    since: int
    """Index of the regime's first level."""
    rate: float
    low: float
    high: float
    """Upper end of the rate's 95 % interval. ``low`` is the lower end."""
    level: float
    """Level of the fitted line at the last index."""
    total: float
    """Growth of the fitted line from the regime's first index to its last index."""


def find_growth(
    indexes: Sequence[int],
    levels: Sequence[float],
    wanted: float,
    least: int,
    sigmas: float = SIGMAS,
) -> Growth | None:
    """Return the growth of the newest regime; ``None`` if this regime doesn't grow.

    Args:
        indexes: Steps of the levels, ascending.
        levels: Memory levels.
        wanted: Required growth per step, above 0.
        least: Minimum number of levels of a regime, 10 or more. If there are fewer levels, the result is
            ``None``.
        sigmas: Required growth in standard deviations of the levels around the trend.
    """
    if len(levels) < least or not _may_grow(indexes, levels, wanted, least):
        return None
    begin = _regime(indexes, levels, least)
    indexes, levels = indexes[begin:], levels[begin:]
    spacing = (indexes[-1] - indexes[0]) / (len(indexes) - 1)
    if not keeps_growing(levels, wanted * spacing, sigmas):
        return None
    line = line_through(indexes, levels)
    low = line.rate - line.error
    if line.rate < wanted or not line.is_certain or _fades(indexes, levels):
        return None
    end = indexes[-1]
    total = line.rate * (end - indexes[0])
    return Growth(indexes[0], line.rate, low, line.rate + line.error, line.at(end), total)


def _may_grow(indexes: Sequence[int], levels: Sequence[float], wanted: float, least: int) -> bool:
    """Return False if the newest levels are hardly above the levels before them.

    In nearly all calls of `find_growth`, this fast check makes the slow checks unnecessary.
    """
    part = least // 4
    rise = median(levels[-part:]) - median(levels[-least : part - least])
    return rise > 0.5 * wanted * (indexes[-1] - indexes[-least]) * (least - part) / least


def _regime(indexes: Sequence[int], levels: Sequence[float], least: int) -> int:
    """Return the position of the first level after the last change point."""
    count = len(levels)
    begin = count - max(count // 2, least)
    line = line_through(indexes[begin:], levels[begin:])
    size = max(count // _GROUPS, 3)
    # `line.spread` comes from only eight medians, and can be too small by chance. In that case, the deviation
    # of the single levels is larger, and is used instead.
    noise = _NEAR * max(_deviation(indexes[begin:], levels[begin:], line), line.spread)
    while begin:
        first = max(begin - size, 0)
        near = median(
            level - line.at(index)
            for index, level in zip(indexes[first:begin], levels[first:begin], strict=True)
        )
        distance = line.middle - indexes[first]
        if abs(near) > noise + distance * min(line.error, 0.25 * abs(line.rate)):
            break
        begin = first
    return begin


def _deviation(indexes: Sequence[int], levels: Sequence[float], line: Line) -> float:
    """Return the median distance of levels from a line."""
    pairs = zip(indexes, levels, strict=True)
    return median(abs(level - line.at(index)) for index, level in pairs)


def _fades(indexes: Sequence[int], levels: Sequence[float]) -> bool:
    """Return True if the second half of the levels grows clearly more slowly than the first half.

    Return False if a half has too few levels for a line.
    """
    if len(levels) < 2 * BLOCKS:
        return False
    half = len(levels) // 2
    first, second = (
        line_through(indexes[:half], levels[:half]),
        line_through(indexes[half:], levels[half:]),
    )
    return second.rate < _FADING * first.rate

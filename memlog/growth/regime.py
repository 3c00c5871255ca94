"""The newest regime of a series of levels: its first index, its rate of growth, and the rate's interval.

1. *Regime.* The newest half of the levels gives a first line. Older levels belong to the same regime as
   long as the median of each group of them lies near the line: a jump or a warm-up is a change point, and
   what lies before it is left out.
2. *Rate and interval* (`memlog.growth.line`), from that regime alone.
3. *Decision.* The regime grows throughout (`memlog.growth.lasting`), the interval lies well above zero, the
   growth doesn't fade (its second half is at least 0.7 times as fast as its first), and it is at least as
   fast as required.
"""

from __future__ import annotations

from collections.abc import Sequence
from statistics import median
from typing import NamedTuple

from memlog.growth.lasting import SIGMAS, keeps_growing
from memlog.growth.line import BLOCKS, Line, line_through

_FADING = 0.7
"""Share of the first half's rate that the second half has to reach."""
_GROUPS = 16
"""Groups into which the levels are divided to find the change point."""
_NEAR = 3.0
"""A group belongs to the regime if its distance from the line is at most this many spreads."""


class Growth(NamedTuple):
    """Growth of levels in their newest regime; rates are per step (or whatever the indexes count)."""

    since: int
    """Index of the regime's first level."""
    rate: float
    low: float
    high: float
    """Ends of the rate's 95 % interval."""
    level: float
    """Level at the end, on the line through the levels."""
    total: float
    """Growth in the whole regime."""


def find_growth(
    indexes: Sequence[int],
    levels: Sequence[float],
    wanted: float,
    least: int,
    sigmas: float = SIGMAS,
) -> Growth | None:
    """Return the growth of the newest regime; ``None`` if it doesn't grow.

    Args:
        indexes: Steps of the levels, ascending.
        levels: Memory levels.
        wanted: Required growth per step, above 0.
        least: Fewest levels of a regime, 10 or more.
        sigmas: As for `keeps_growing`.
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
    """Return False if the newest levels are hardly above those before: nearly all calls end here."""
    part = least // 4
    rise = median(levels[-part:]) - median(levels[-least : part - least])
    return rise > 0.5 * wanted * (indexes[-1] - indexes[-least]) * (least - part) / least


def _regime(indexes: Sequence[int], levels: Sequence[float], least: int) -> int:
    """Return the position of the first level after the last change point."""
    count = len(levels)
    begin = count - max(count // 2, least)
    line = line_through(indexes[begin:], levels[begin:])
    size = max(count // _GROUPS, 3)
    # The medians of small groups spread more than those of the blocks.
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
    """Return True if the second half is clearly slower than the first; few levels can't tell."""
    if len(levels) < 2 * BLOCKS:
        return False
    half = len(levels) // 2
    first, second = (
        line_through(indexes[:half], levels[:half]),
        line_through(indexes[half:], levels[half:]),
    )
    return second.rate < _FADING * first.rate

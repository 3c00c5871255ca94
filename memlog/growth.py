"""Whether a series of levels keeps growing, and how fast: the test behind ``grows``.

A training step is a round trip: after it the same things should be alive. Warm-up, a jump, a swing and a
cache that fills end; a leak does not. So a window of levels counts as growing only if all of this holds:

- of its four parts, each one's median and each one's lowest level lie above those of the part before: a jump
  raises one part alone, and a swing that is shorter than a part none;
- the last rise is at least half the mean one: the growth does not fade out;
- its highest level was not reached longer ago than twice the longest time between two new highs: the growth
  has not stopped;
- it is more than five times as large as what the levels spread around the trend.

A trend that has to hold in every part takes the place of the Mann-Kendall test, which gives false alarms
where each value resembles the one before (Hamed and Rao 1998, doi:10.1016/S0022-1694(97)00125-X), as levels
of memory do. Medians, and a spread that one value in five can't change, are what single spikes leave alone.

A swing whose rise takes longer than the window looks like a leak until it ends: name more steps.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from statistics import median
from typing import NamedTuple

FEW = 10
"""Levels below which each is a part of its own, and has to rise."""
_PARTS = 4
_STEADY = 0.5
"""Share of the mean rise, and of the rise that is looked for, that a part's median has to reach."""
_LOWEST = 0.25
"""Share of the rise that is looked for that a part's lowest level has to reach: it is the noisier."""
_HIGHS = 12
"""Part of the whole growth, as its divisor, that makes a new high."""
_PATIENCE = 2
_SIGMAS = 5
_SIGMAS_OF_FOUR_FIFTHS = 1.2816
"""Standard deviations that hold four fifths of a normal distribution."""


class Trend(NamedTuple):
    """How levels grew, from the first part's median to the last one's."""

    pace: float
    """Growth per level."""
    level: float
    """The last part's median."""


def trend(levels: Sequence[float]) -> Trend:
    """Reads the trend of some levels.

    Args:
        levels: In order, evenly spaced; three at least.
    """
    parts = _parts(levels)
    first, last = median(parts[0]), median(parts[-1])
    return Trend((last - first) / (len(parts[0]) * (len(parts) - 1)), last)


def keeps_growing(levels: Sequence[float], wanted: float) -> bool:
    """Whether the levels grow throughout.

    Args:
        levels: As for `trend`.
        wanted: The growth per level that is looked for, 0 or more.
    """
    parts = _parts(levels)
    need = wanted * len(parts[0])
    rises = _rises([median(part) for part in parts])
    grown = sum(rises)
    if min(rises) <= _STEADY * need or rises[-1] < _STEADY * grown / len(rises):
        return False
    return len(levels) < FEW or (
        min(_rises([min(part) for part in parts])) > _LOWEST * need
        and not _has_stopped(levels, grown / _HIGHS)
        and grown > _SIGMAS * _spread(levels, trend(levels).pace)
    )


def _parts(levels: Sequence[float]) -> list[Sequence[float]]:
    """The newest levels in parts of one size; a few of the oldest may be left over."""
    count = _PARTS if len(levels) >= FEW else len(levels)
    size = len(levels) // count
    first = len(levels) - count * size
    return [levels[at : at + size] for at in range(first, len(levels), size)]


def _rises(levels: Sequence[float]) -> list[float]:
    return [after - before for before, after in pairwise(levels)]


def _has_stopped(levels: Sequence[float], by: float) -> bool:
    """Whether the highest level was reached longer ago than the time between new highs explains.

    Args:
        levels: In order.
        by: What makes a new high.
    """
    highest, last, longest = levels[0], 0, 1
    for at, level in enumerate(levels):
        if level > highest + by:
            longest = max(longest, at - last)
            highest, last = level, at
    top = max(levels) - by
    reached = next(at for at, level in enumerate(levels) if level >= top)
    return len(levels) - 1 - reached > _PATIENCE * longest


def _spread(levels: Sequence[float], pace: float) -> float:
    """Standard deviation around the trend, from the four fifths of the levels that are nearest to it."""
    rest = [level - pace * at for at, level in enumerate(levels)]
    middle = median(rest)
    away = sorted(abs(each - middle) for each in rest)
    return away[len(away) * 4 // 5] / _SIGMAS_OF_FOUR_FIFTHS

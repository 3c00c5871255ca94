"""Test whether a series of memory levels grows throughout.

After each training step the same objects should be alive. Warm-up, a jump, a swing and the filling of a
cache come to an end; a leak does not. So a window of levels counts as growing only if all of these hold:

- The window has four parts. The median and the lowest level of each part are above those of the previous
  part. A jump raises only one part, and a swing that is shorter than a part raises none.
- The last rise is at least half the mean rise, so the growth does not fade out.
- The growth has not stopped. The time since the last new high is at most twice the longest earlier time
  between two new highs.
- The growth is more than five times the spread of the levels around the trend (by default).
- The rate's interval (`memlog.growth.line`) lies above a quarter of the rate. Slow swings widen it.

The Mann-Kendall test is not used. It gives false alarms if each value is similar to the value before it
(Hamed and Rao 1998, doi:10.1016/S0022-1694(97)00125-X), as memory levels are. Instead the trend has to hold
in every part. Single spikes do not change the medians. They do not change the spread either, because the
spread ignores the 20 % of the levels that are farthest from the trend.

If a swing rises for longer than the window, the swing looks like a leak until the rise ends. Only a window of
more steps can tell such a swing from a leak.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from statistics import median
from typing import NamedTuple

from memlog.growth.line import BLOCKS, line_through

FEW = 10
"""Minimum number of levels to split into four parts. If there are fewer levels, each level is a part."""
_PARTS = 4
_STEADY = 0.5
"""Fraction for two tests of the rises. A rise is the difference between two neighbouring parts' medians.

The levels count as growing only if both tests pass:

- Each rise exceeds this fraction of the required rise.
- The last rise is at least this fraction of the mean rise."""
_LOWEST = 0.25
"""Minimum rise of the lowest level from part to part, as a fraction of the required rise. Lowest levels are
noisier than medians. So the fraction is less than `_STEADY`."""
_HIGHS = 12
"""Divisor of the total growth. A level is a new high if it exceeds the last high by more than the result."""
_PATIENCE = 2
"""Factor. The longest time between two new highs, multiplied by this factor, is the maximum time without a
new high. After this time, the growth has stopped."""
SIGMAS = 5
"""Required growth by default, in standard deviations of the levels around the trend."""
_SIGMAS_OF_FOUR_FIFTHS = 1.2816
"""Standard deviations on each side of the mean that cover four fifths of a normal distribution."""


class Trend(NamedTuple):
    """Trend of levels. `trend` splits them into parts, and compares the first and the last part's medians."""

    pace: float
    """Mean growth from one level to the next."""
    level: float
    """Median of the last part."""


def trend(levels: Sequence[float]) -> Trend:
    """Compute the trend of at least three levels, in order and evenly spaced."""
    parts = _parts(levels)
    first, last = median(parts[0]), median(parts[-1])
    return Trend((last - first) / (len(parts[0]) * (len(parts) - 1)), last)


def keeps_growing(levels: Sequence[float], wanted: float, sigmas: float = SIGMAS) -> bool:
    """Return True if the levels grow throughout.

    Args:
        levels: At least three levels, in order and evenly spaced.
        wanted: Required growth per level, 0 or more.
        sigmas: Required growth in standard deviations of the levels around the trend.
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
        and grown > sigmas * _spread(levels, trend(levels).pace)
        and (len(levels) < 2 * BLOCKS or line_through(range(len(levels)), levels).is_certain)
    )


def _parts(levels: Sequence[float]) -> list[Sequence[float]]:
    """Split the levels into parts of equal size. If they can't be split evenly, drop the oldest."""
    count = _PARTS if len(levels) >= FEW else len(levels)
    size = len(levels) // count
    first = len(levels) - count * size
    return [levels[at : at + size] for at in range(first, len(levels), size)]


def _rises(levels: Sequence[float]) -> list[float]:
    return [after - before for before, after in pairwise(levels)]


def _has_stopped(levels: Sequence[float], by: float) -> bool:
    """Return True if the levels have reached no new high for too long (`_PATIENCE`).

    A level is a new high if it exceeds the last high by more than ``by``.
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
    """Return the levels' standard deviation around the trend.

    It is estimated from the four fifths of the levels that are nearest to the trend.
    """
    residuals = [level - pace * at for at, level in enumerate(levels)]
    middle = median(residuals)
    distances = sorted(abs(residual - middle) for residual in residuals)
    return distances[len(distances) * 4 // 5] / _SIGMAS_OF_FOUR_FIFTHS

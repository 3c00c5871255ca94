"""Test whether levels grow throughout a series: the rate, at several scales, and the newest regime.

The levels are divided into eight blocks. The rate is Sen's slope of the blocks' medians: the median of the
slopes between all pairs of medians (Theil 1950, Sen 1968, doi:10.1080/01621459.1968.10480934). Medians ignore
spikes, and the slope ignores a deviating block.

Each memory level depends on the levels before it. So an interval from single levels would be far too narrow.
The medians of whole blocks are nearly independent (batch means: Schmeiser 1982, doi:10.1287/opre.30.3.556).
So the interval is computed from these medians, with Student's distribution. If neighbouring medians deviate
from the line in the same direction, the interval is widened, as an AR(1) process requires (von Storch 1999,
doi:10.1007/978-3-662-03744-7_2).

After each training step the same objects should be alive. Warm-up, a jump, a swing and the filling of a
cache come to an end; a leak does not. So a window of levels counts as growing only if all of these hold:

- The window has four parts. The median and the lowest level of each part are above those of the previous
  part. A jump raises only one part, and a swing that is shorter than a part raises none.
- The last rise is at least half the mean rise, so the growth does not fade out.
- The growth has not stopped. The time since the last new high is at most twice the longest earlier time
  between two new highs.
- The growth is more than five times the spread of the levels around the trend (by default).
- The rate's interval (`memlog.growth.lasting`) lies above a quarter of the rate. Slow swings widen it.

The Mann-Kendall test is not used. It gives false alarms if each value is similar to the value before it
(Hamed and Rao 1998, doi:10.1016/S0022-1694(97)00125-X), as memory levels are. Instead the trend has to hold
in every part. Single spikes do not change the medians. They do not change the spread either, because the
spread ignores the 20 % of the levels that are farthest from the trend.

If a swing rises for longer than the window, the swing looks like a leak until the rise ends. Only a window of
more steps can tell such a swing from a leak.

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

import math
from collections import deque
from collections.abc import Sequence
from itertools import combinations, islice, pairwise
from statistics import fmean, median
from typing import NamedTuple

BLOCKS = 8
_STUDENT = 2.447
"""97.5 % quantile of Student's distribution with six degrees of freedom: eight medians minus the two
parameters of a line."""
_MOST_SIMILAR = 0.7
"""Maximum autocorrelation. A larger value is replaced by this maximum, because a value computed from only
eight medians is uncertain."""
_CERTAIN = 0.25
"""Minimum ratio of the interval's lower end to the rate. Below this ratio, the growth is not certain."""


class Line(NamedTuple):
    """Line through the medians of blocks of levels."""

    rate: float
    """Slope of the line, per index."""
    error: float
    """Half the width of the rate's 95 % interval."""
    middle: float
    """Mean of the blocks' indices."""
    level: float
    """Level of the line at ``middle``."""
    spread: float
    """Root mean square of the medians' distances from the line."""

    @property
    def is_certain(self) -> bool:
        """True if the rate's interval lies well above zero."""
        return self.rate - self.error > _CERTAIN * abs(self.rate)

    def at(self, index: float) -> float:
        return self.level + self.rate * (index - self.middle)


def line_through(indexes: Sequence[int], levels: Sequence[float]) -> Line:
    """Return Sen's line through the medians of eight blocks, with the interval of its rate.

    There are at least eight levels. ``indexes`` are their steps, ascending.
    """
    count = len(levels)
    edges = [count * block // BLOCKS for block in range(BLOCKS + 1)]
    places = [(indexes[a] + indexes[b - 1]) / 2 for a, b in pairwise(edges)]
    values = [median(levels[a:b]) for a, b in pairwise(edges)]
    points = list(zip(places, values, strict=True))
    rate = median((y - v) / (x - u) for (u, v), (x, y) in combinations(points, 2))
    middle = fmean(places)
    # The median again: one deviating block does not move the line.
    level = median(y - rate * (x - middle) for x, y in points)
    distances = [y - level - rate * (x - middle) for x, y in points]
    squares = sum(distance * distance for distance in distances)
    # The line's two parameters take two degrees of freedom.
    spread = math.sqrt(squares / (BLOCKS - 2))
    width = math.sqrt(sum((x - middle) ** 2 for x in places))
    alike = _autocorrelation(distances, squares)
    # The factor for an AR(1) process: medians that deviate alike hold less information.
    error = _STUDENT * spread / width * math.sqrt((1 + alike) / (1 - alike))
    return Line(rate, error, middle, level, math.sqrt(squares / BLOCKS))


def _autocorrelation(distances: Sequence[float], squares: float) -> float:
    """Return the correlation between neighbouring distances, limited to the range from 0 to `_MOST_SIMILAR`.

    ``squares`` is the sum of the squares of ``distances``.
    """
    if not squares:
        return 0.0
    neighbours = sum(a * b for a, b in pairwise(distances))
    return min(max(neighbours / squares, 0.0), _MOST_SIMILAR)


MAX_LEVELS = 128
"""Maximum number of levels in a window. In a full window, a new level replaces the oldest."""
_SCALES = 3
"""Default number of windows of a series. The first window covers 128 readings. Each later window covers four
times as many readings as the window before it."""
JOINED = 4
"""Number of levels that are joined to one level of the next, longer window. The lowest level is used."""


class LevelWindow:
    """The newest levels of a series at one scale.

    At the finest scale, a level is one reading. At each coarser scale, a level is the lowest of `JOINED`
    levels of the next finer scale.

    Attributes:
        indexes: Steps or epochs of the levels.
        levels: The levels, the oldest first.
        unseen: Number of levels that were added since the window was last judged. The caller that judges the
            window sets it to 0.
    """

    def __init__(self) -> None:
        self.indexes: deque[int] = deque(maxlen=MAX_LEVELS)
        self.levels: deque[float] = deque(maxlen=MAX_LEVELS)
        self.clear()

    def clear(self) -> None:
        self.indexes.clear()
        self.levels.clear()
        self._added = 0
        # A window is judged as soon as it has enough levels.
        self.unseen = MAX_LEVELS

    def add(self, index: int, level: float) -> None:
        self.indexes.append(index)
        self.levels.append(level)
        self._added += 1
        self.unseen += 1

    def lower(self, level: float) -> None:
        """Add a second reading at the newest index. Keep the lower of the two readings."""
        if self.levels:
            self.levels[-1] = min(self.levels[-1], level)

    def joined(self) -> float | None:
        """Return the level to add to the next, longer window: the lowest of the newest `JOINED` levels.

        Return ``None`` if the newest level does not complete a group of `JOINED` levels.
        """
        if not self._added or self._added % JOINED:
            return None
        return min(islice(reversed(self.levels), JOINED))


class LevelScales:
    """Windows of one series at several scales, the finest first."""

    def __init__(self, count: int = _SCALES) -> None:
        self.windows = tuple(LevelWindow() for _ in range(count))
        self.finest = self.windows[0]

    def clear(self) -> None:
        for window in self.windows:
            window.clear()

    def add(self, index: int, level: float) -> list[LevelWindow]:
        """Add the next level. Return the windows that got a new level."""
        added = []
        for window in self.windows:
            window.add(index, level)
            added.append(window)
            joined = window.joined()
            if joined is None:
                break
            level = joined
        return added

    def covering(self, since: int | None, least: int) -> LevelWindow | None:
        """Return the finest window that still has all levels from the index ``since`` on.

        If ``since`` is ``None``, return the finest window of all. Return ``None`` if no window reaches back
        to ``since``, or if the window to return has fewer than ``least`` levels.
        """
        for window in self.windows:
            if len(window.levels) < least:
                return None
            # A window that is not full has dropped no level.
            if since is None or len(window.levels) < MAX_LEVELS or window.indexes[0] <= since:
                return window
        return None

    def highest_before(self, index: int) -> float | None:
        """Return the highest level before an index; ``None`` if there is none. Ignore the finest window."""
        # A level of a longer window is the lowest of several, so a spike does not count.
        return max(
            (
                level
                for window in self.windows[1:]
                for at, level in zip(window.indexes, window.levels, strict=True)
                if at < index
            ),
            default=None,
        )


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
    # Noise alone can make one of the last levels the highest. So a level just below counts as the
    # top.
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

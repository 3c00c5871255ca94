"""Rate of growth of memory levels, with a confidence interval that is valid for autocorrelated levels.

The levels are divided into eight blocks. The rate is Sen's slope of the blocks' medians: the median of the
slopes between all pairs of medians (Theil 1950, Sen 1968, doi:10.1080/01621459.1968.10480934). Medians ignore
spikes, and the slope ignores a deviating block.

Each memory level depends on the levels before it. So an interval from single levels would be far too narrow.
The medians of whole blocks are nearly independent (batch means: Schmeiser 1982, doi:10.1287/opre.30.3.556).
So the interval is computed from these medians, with Student's distribution. If neighbouring medians deviate
from the line in the same direction, the interval is widened, as an AR(1) process requires (von Storch 1999,
doi:10.1007/978-3-662-03744-7_2).
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from itertools import combinations, pairwise
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
    level = median(y - rate * (x - middle) for x, y in points)
    distances = [y - level - rate * (x - middle) for x, y in points]
    squares = sum(distance * distance for distance in distances)
    spread = math.sqrt(squares / (BLOCKS - 2))
    width = math.sqrt(sum((x - middle) ** 2 for x in places))
    alike = _autocorrelation(distances, squares)
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

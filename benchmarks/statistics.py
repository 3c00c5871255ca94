"""Medians and ratios with intervals that assume no distribution of the noise."""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence
from random import Random
from typing import NamedTuple

_RESAMPLES = 2000


class Estimate(NamedTuple):
    """A median and the interval that contains the true median with at least 95 % confidence."""

    median: float
    low: float
    high: float

    def format(self, digits: int) -> str:
        """Return the estimate as text, such as ``1.003 [0.998, 1.012]``."""
        return f"{self.median:.{digits}f} [{self.low:.{digits}f}, {self.high:.{digits}f}]"


def estimate(values: Sequence[float]) -> Estimate:
    """Return the median of ``values`` with the distribution-free interval between two order statistics.

    The number of values below the true median is binomial with p = 1/2, whatever the distribution
    (Conover, Practical Nonparametric Statistics, 3rd ed., section 3.2). At least six values are needed.
    """
    ordered = sorted(values)
    rank = _rank(len(ordered))
    return Estimate(statistics.median(ordered), ordered[rank], ordered[-1 - rank])


def ratio_of_sums(above: Sequence[float], below: Sequence[float]) -> Estimate:
    """Return the sum of ``above`` divided by the sum of ``below``, whose values are paired by index.

    The interval is the percentile bootstrap interval over the pairs (Efron and Tibshirani, An Introduction to
    the Bootstrap, section 13.3). Unlike that of a median, it includes rare and expensive steps.
    """
    pairs = list(zip(above, below, strict=True))
    random = Random(0)  # noqa: S311 - resampling is no cryptography
    ratios = []
    for _ in range(_RESAMPLES):
        drawn = random.choices(pairs, k=len(pairs))
        ratios.append(sum(pair[0] for pair in drawn) / sum(pair[1] for pair in drawn))
    ratios.sort()
    low, high = ratios[_RESAMPLES // 40], ratios[-_RESAMPLES // 40]
    return Estimate(sum(above) / sum(below), low, high)


def _rank(count: int) -> int:
    """Return the largest k with P(Binomial(count, 1/2) <= k - 1) <= 2.5 %, as an index from 0."""
    below, rank = 0.0, 0
    while rank < count // 2:
        below += math.comb(count, rank) / 2**count
        if below > 0.025:
            break
        rank += 1
    return max(rank - 1, 0)

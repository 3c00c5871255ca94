"""Forecast of the step at which growing memory reaches its limit."""

from __future__ import annotations

from memlog.growth.regime import Growth

_WIDEST = 2.0
"""Maximum ratio of the highest to the lowest estimate of the steps until the limit. Above this ratio, memlog
makes no forecast."""
_FURTHEST = 1_000_000
"""If the limit is more than this number of steps away, memlog makes no forecast, because such slow growth
does not matter."""


def steps_left(growth: Growth, free: float) -> tuple[float, float]:
    """Return the lowest and the highest estimate of the number of steps until ``free`` bytes are used.

    The estimates follow from the upper and the lower end of the confidence interval of the growth's rate.
    """
    return max(free, 0) / growth.high, max(free, 0) / growth.low


def forecast(growth: Growth, free: float | None, step: int) -> tuple[int, int] | None:
    """Return the two steps between which a limit will be reached, if the rate of growth does not change.

    Args:
        growth: Growth. If its rate can be zero, there is no forecast.
        free: Bytes left until the limit; ``None`` if unknown.
        step: Newest step.

    Returns:
        ``None`` if the limit is unknown or too far off, or if the two steps are too far apart to help.
    """
    if free is None or growth.low <= 0:
        return None
    fewest, most = steps_left(growth, free)
    if most > _WIDEST * max(fewest, 1.0) or fewest > _FURTHEST:
        return None
    return step + int(fewest), step + round(most)

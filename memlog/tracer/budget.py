"""When the next step may be traced, so that tracing takes no more than its share of training time."""

from __future__ import annotations

import statistics
from collections import deque

DEFAULT_SHARE = 0.01
_PLAIN_STEPS = 32
"""The newest steps without tracing, whose median is what a step takes."""


class Budget:
    """Keeps account of what tracing costs.

    A traced step's cost is the time that it took beyond the median of the newest plain ones; where there is
    none yet, all of it. To that comes what tracing does between steps.

    Args:
        share: Of training time, 0 to 1.
        now: Seconds, of any steady clock: training begins.
    """

    def __init__(self, share: float, now: float) -> None:
        self._share = share
        self._begun = now
        self._plain: deque[float] = deque(maxlen=_PLAIN_STEPS)
        self._traced = 0.0
        self._count = 0
        self._between = 0.0
        self._dearest = 0.0

    def plain_step(self, seconds: float) -> None:
        """A step without tracing took so long."""
        self._plain.append(seconds)

    def traced_step(self, seconds: float, between: float) -> None:
        """A traced step took so long, and tracing ``between`` more before and after it."""
        self._traced += seconds
        self._count += 1
        self._between += between
        self._dearest = max(self._dearest, seconds + between - self._step())

    def spent(self) -> float:
        """Seconds that tracing has cost so far."""
        return self._between + max(self._traced - self._count * self._step(), 0.0)

    def allows_another(self, now: float) -> bool:
        """Whether one more, as dear as the dearest so far, stays within the share."""
        return self.spent() + self._dearest <= self._share * (now - self._begun)

    def _step(self) -> float:
        return statistics.median(self._plain) if self._plain else 0.0

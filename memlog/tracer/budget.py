"""When the next step may be traced, so that tracing takes no more than its share of training time."""

from __future__ import annotations

import statistics
from collections import deque

DEFAULT_SHARE = 0.01
SPACING = 20
"""Of so many steps at most one is traced: where steps take now longer, now shorter, no clock tells what
tracing adds."""

_USED = 0.6
"""Of the share: the clock does not tell all that tracing costs, such as caches that it has emptied."""
_PLAIN_STEPS = 32
"""The newest steps without tracing, whose median is what a step takes."""
_LEAST = 0.05
"""A traced step costs at least this share of a plain one, whatever the clock says."""


class Budget:
    """Keeps account of what tracing costs.

    A traced step's cost is the time that it took beyond the median of the newest plain ones; where there is
    none yet, all of it until there are. To that comes what tracing does between steps.

    Args:
        share: Of training time, 0 to 1.
        now: Seconds, of any steady clock: training begins.
    """

    def __init__(self, share: float, now: float) -> None:
        self._share = share
        self._begun = now
        self._plain: deque[float] = deque(maxlen=_PLAIN_STEPS)
        self._since = SPACING
        self._unsettled = 0.0
        self._settled = 0.0
        self._dearest = 0.0

    def plain_step(self, seconds: float) -> None:
        """A step without tracing took so long."""
        self._plain.append(seconds)
        self._since += 1
        if self._unsettled:
            unsettled, self._unsettled = self._unsettled, 0.0
            self._settle(unsettled)

    def traced_step(self, seconds: float, between: float) -> None:
        """A traced step took so long, and tracing ``between`` more before and after it."""
        self._since = 0
        self._settled += between
        if self._plain:
            self._settle(seconds, between)
        else:
            self._unsettled += seconds

    def charge(self, seconds: float) -> None:
        """Tracing cost so long, and nothing came of it."""
        self._since = 0
        self._settled += seconds
        self._dearest = max(self._dearest, seconds)

    @property
    def usual(self) -> float | None:
        """Seconds that a step takes without tracing; ``None`` where there was none yet."""
        return statistics.median(self._plain) if self._plain else None

    def spent(self) -> float:
        """Seconds that tracing has cost so far."""
        return self._settled + self._unsettled

    def allows_another(self, now: float) -> bool:
        """Whether one more, as dear as the dearest so far, stays within the share."""
        if self._since < SPACING:
            return False
        return self.spent() + self._dearest <= _USED * self._share * (now - self._begun)

    def _settle(self, seconds: float, between: float = 0.0) -> None:
        plain = statistics.median(self._plain)
        cost = max(seconds - plain, _LEAST * plain)
        self._settled += cost
        self._dearest = max(self._dearest, cost + between)

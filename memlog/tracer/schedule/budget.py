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
_LEAST_SECONDS = 10.0
"""A run that is shorter may spend the share of so many."""
_EARLY_SHARES = 5
"""What a trace that keeps up with a young run may cost, in shares of the time so far."""
_EARLY_SPACING = 29
"""Plain steps between the traces of a run that is still so short: with two steps more, those of setting up,
the next are the steps 32, 64, 128 and so on."""
_PLAIN_STEPS = 32
"""The newest steps without tracing, whose median is what a step takes."""
_NEWEST = 8
"""Traced steps, whose mean cost is what the next is taken to cost."""
_LEAST = 0.05
"""A traced step costs at least this share of a plain one, whatever the clock says."""


class Budget:
    """Keeps account of what tracing costs.

    A traced step's cost is the time that it took beyond the median of the newest plain ones. To that comes
    what tracing does between steps. What is done once stands apart: the first traced step, in which code is
    loaded and what every operation takes is measured, and the second, which is there to be known.

    A run may be over at any time. So that its second half is traced, too, a step of a run of which nothing
    was traced since it was half as long may cost five times the share of the time so far. Each such trace
    comes when the run has doubled, so that together they fall below the share as it goes on. A run of less
    than ten seconds may spend as much as one of ten.

    Args:
        share: Of training time, 0 to 1.
        now: Seconds, of any steady clock: training begins.

    Attributes:
        set_up: Seconds that were spent once.
    """

    def __init__(self, share: float, now: float) -> None:
        self.set_up = 0.0
        self._share = share
        self._started = now
        self._plain: deque[float] = deque(maxlen=_PLAIN_STEPS)
        self._costs: deque[float] = deque(maxlen=_NEWEST)
        self._since = SPACING
        self._steps = self._last_traced = 0
        self._spent = 0.0
        self._unsettled = 0

    def plain_step(self, seconds: float) -> None:
        """A step without tracing took so long."""
        self._plain.append(seconds)
        if self._unsettled:  # what these steps would have taken anyway is known now
            self.set_up = max(self.set_up - self._unsettled * seconds, 0.0)
            self._unsettled = 0
        self._since += 1
        self._steps += 1

    def traced_step(
        self, seconds: float, between: float, steps: int = 1, *, setting_up: bool = False
    ) -> None:
        """A traced step took so long, and tracing ``between`` more before and after it.

        Args:
            seconds: From the step before on.
            between: Seconds.
            steps: Of the clock, that were traced together.
            setting_up: Whether it stands apart.
        """
        usual = self.median_step
        cost = seconds + between
        if usual is not None:
            cost = max(seconds - steps * usual, _LEAST * steps * usual) + between
        self._steps += steps
        self._last_traced = self._steps
        self._since = 0
        if setting_up:
            self.set_up += cost
            self._unsettled += steps if usual is None else 0
            self._costs.clear()
        else:
            self._spent += cost
        self._costs.append(cost)

    def charge(self, seconds: float, *, setting_up: bool = False) -> None:
        """Tracing cost so long, and nothing came of it."""
        self._since = 0
        if setting_up:
            self.set_up += seconds
        else:
            self._spent += seconds
            self._costs.append(seconds)

    @property
    def median_step(self) -> float | None:
        """Seconds that a step takes without tracing; ``None`` where there was none yet."""
        return statistics.median(self._plain) if self._plain else None

    def spent(self) -> float:
        """Seconds that tracing has cost so far, without what was done once."""
        return self._spent

    def allows_another(self, now: float, *, outdated: bool = False) -> bool:
        """Whether one more, as dear as the newest, stays within the share.

        Args:
            now: Seconds.
            outdated: Whether what was traced is not what the run does now.
        """
        if self._since < SPACING:
            return False
        another = statistics.fmean(self._costs) if self._costs else 0.0
        with_another = self._spent + another
        elapsed = now - self._started
        if with_another <= _USED * self._share * elapsed:
            return True
        early = self._since >= _EARLY_SPACING and 2 * (self._last_traced - 1) <= self._steps
        if early and another <= _EARLY_SHARES * self._share * elapsed:
            return True
        return (early or outdated) and with_another <= self._share * max(elapsed, _LEAST_SECONDS)

"""Time budget of tracing: decides when the next step may be traced, and how long tracing it may take."""

from __future__ import annotations

import statistics
from collections import deque

SPACING = 20
"""Minimum number of steps without tracing between two traces, from the third trace on. If the durations of
steps vary, a part of the cost can't be measured. Only this limit then bounds that part."""
ALLOWANCES = (100.0, 50.0)
"""Seconds of training. The first trace may cost the share of the first number before the run has earned it,
1 s with the default share: enough for the whole step of nearly all models. The first two traces together may
cost the share of the second number."""
SET_UP = len(ALLOWANCES)
"""Number of first traces that have an allowance."""

_USED = 0.6
"""Fraction of the earned time that traces after the first two may be expected to use. The remainder is left
for what a trace may take longer, and for costs that can't be measured, such as emptied caches."""
_PLAIN_STEPS = 32
"""Number of newest steps without tracing. The median of their durations is the usual duration of a step."""
_NEWEST = 8
"""Number of newest traces. The mean of their costs is the expected cost of the next trace."""
_MORE = 2.0
"""Factor from the cost of a trace that was cut to the expected cost of the next one."""


class Budget:
    """Account of the cost of tracing.

    A plain step is a step without tracing. The cost of a trace is its duration minus the median duration of
    the newest plain steps, but at least the time that memlog's own code took. All traces count, the first
    one included. A run earns ``share`` of its time. A trace begins if the run has earned its expected cost
    and the cost of all traces before it. Only the first two may begin earlier, within the `ALLOWANCES`: most
    users want to see the first step, and the first step in which the optimizer has its state.

    ``share``: Share of training time that tracing may cost, 0 to 1.

    Attributes:
        spent: Seconds that tracing has cost so far, without set-up.
        set_up: Seconds that the first two traces have cost.
    """

    def __init__(self, share: float) -> None:
        self.spent = self.set_up = 0.0
        self._share = share
        self._started: float | None = None
        self._plain: deque[float] = deque(maxlen=_PLAIN_STEPS)
        self._costs: deque[float] = deque(maxlen=_NEWEST)
        self._since = self._traced = 0
        self._spacing = SPACING

    def begin(self, now: float) -> None:
        """At the first call, set the start of training. ``now`` is in seconds of any steady clock."""
        self._started = now if self._started is None else self._started

    def plain_step(self, seconds: float) -> None:
        self._plain.append(seconds)
        self._since += 1

    def traced_step(
        self, seconds: float, own: float, steps: int = 1, *, once: float = 0.0, cut: bool = False
    ) -> None:
        """Record a trace.

        Args:
            seconds: Seconds from the end of the step before the trace to the end of memlog's work on it.
            own: Seconds of these that memlog's own code took.
            steps: Number of steps in the trace.
            once: Seconds of ``own`` for work that later traces do not repeat.
            cut: True if the trace covers a part of the steps because it reached its limit.
        """
        usual = self.median_step
        cost = own if usual is None else max(seconds - steps * usual, own)
        if self._traced < SET_UP:
            # The first trace also loads code of torch, which later ones find loaded.
            self.set_up += cost
            self._costs.clear()
        else:
            self.spent += cost
        self._traced += 1
        self._since = 0
        self._spacing = 1 if self._traced < SET_UP else SPACING
        if cut:
            self._costs.clear()
        self._costs.append(_MORE * cost if cut else cost - once)

    def charge(self, seconds: float) -> None:
        """Record the cost of a trace that gave no result, in seconds."""
        self._since = 0
        self._spacing = SPACING
        self._costs.append(seconds)
        if self._traced:
            self.spent += seconds
        else:
            self.set_up += seconds

    @property
    def median_step(self) -> float | None:
        """Median duration of the newest steps without tracing, in seconds; ``None`` if there was none yet."""
        return statistics.median(self._plain) if self._plain else None

    def limit(self, now: float) -> float:
        """Return the seconds that memlog's own code may take in a trace that begins now."""
        return max(self._may_cost(now) - self.spent - self.set_up, 0.0)

    def allows_another(self, now: float, *, outdated: bool = False) -> bool:
        """Return whether the budget allows another trace of the expected cost.

        ``outdated``: True if the kept trace no longer describes what the run does. The trace may then use all
        of the earned time.
        """
        if self._since < self._spacing:
            return False
        another = statistics.fmean(self._costs) if self._costs else 0.0
        used = 1.0 if outdated or self._traced < SET_UP else _USED
        return self.spent + self.set_up + another <= used * self._may_cost(now)

    def _may_cost(self, now: float) -> float:
        """Return the seconds that all traces together may have cost by now."""
        elapsed = 0.0 if self._started is None else now - self._started
        return self._share * max(elapsed, *ALLOWANCES[self._traced :][:1], 0.0)

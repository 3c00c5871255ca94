"""Time budget of tracing: decides when the next step may be traced."""

from __future__ import annotations

import statistics
from collections import deque

SPACING = 20
"""Minimum number of steps without tracing between two traces. The limit does not apply to the first two
traces (set-up). If the durations of steps vary, the cost of tracing can't be measured. Only this limit then
bounds the cost."""

_USED = 0.6
"""Fraction of the allowed time that measured costs may use. The remainder is left for costs that can't be
measured, such as emptied caches."""
_LEAST_SECONDS = 60.0
"""Minimum duration of a run, in seconds, that the budget assumes. Traces of a shorter run may cost 0.6 s with
the default share. This is enough for networks with hundreds of narrow layers. A traced step of such a network
takes as long as ten steps without tracing."""
_EARLY_SHARES = 5
"""Factor. Early in a run, one trace may cost this factor times the allowed share of the time so far."""
_EARLY_SPACING = 29
"""Minimum number of steps without tracing between two traces early in a run. With this number, the traced
steps are 0 and 2 (set-up), then 32, 64, 128 and so on."""
_PLAIN_STEPS = 32
"""Number of newest steps without tracing. The median of their durations is the usual duration of a step."""
_NEWEST = 8
"""Number of newest traced steps. The mean of their costs is the expected cost of the next traced step."""
_LEAST = 0.05
"""Minimum cost of a traced step, as a fraction of the usual duration of a step without tracing."""


class Budget:
    """Account of the cost of tracing.

    A plain step is a step without tracing. The cost of a traced step is its duration minus the median
    duration of the newest plain steps, plus the time that tracing takes between steps. The cost of set-up is
    counted separately. Set-up is the first two traced steps. The first one loads code and measures every
    operation. The second one provides the first realistic cost.

    All traces together may cost ``share`` of the time so far. But a run may end at any time, and its second
    half should be traced too. So when the number of steps has doubled since the last trace, a single trace
    may cost up to five times ``share`` of the time so far. The total cost falls below ``share`` as the run
    goes on. A run of less than a minute may spend as much as a run of a minute.

    ``share``: Share of training time that tracing may cost, 0 to 1.

    Attributes:
        spent: Seconds that tracing has cost so far, without set-up.
        set_up: Seconds that set-up has cost.
    """

    def __init__(self, share: float) -> None:
        self.spent = self.set_up = 0.0
        self._share = share
        self._started: float | None = None
        self._plain: deque[float] = deque(maxlen=_PLAIN_STEPS)
        self._costs: deque[float] = deque(maxlen=_NEWEST)
        self._since = SPACING
        self._steps = self._last_traced = 0
        self._unsettled = 0

    def begin(self, now: float) -> None:
        """At the first call, set the start of training. ``now`` is in seconds of any steady clock."""
        self._started = now if self._started is None else self._started

    def plain_step(self, seconds: float) -> None:
        self._plain.append(seconds)
        if self._unsettled:  # set-up steps that were charged in full
            self.set_up = max(self.set_up - self._unsettled * seconds, 0.0)
            self._unsettled = 0
        self._since += 1
        self._steps += 1

    def traced_step(
        self, seconds: float, between: float, steps: int = 1, *, setting_up: bool = False
    ) -> None:
        """Record a traced step.

        Args:
            seconds: Seconds from the end of the step before the trace to the end of the trace's last step.
            between: Seconds that tracing took between steps.
            steps: Number of steps in the trace.
            setting_up: True if the cost belongs to set-up.
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
            self.spent += cost
        self._costs.append(cost)

    def charge(self, seconds: float, *, setting_up: bool = False) -> None:
        """Record the cost of a trace that gave no result, in seconds."""
        self._since = 0
        if setting_up:
            self.set_up += seconds
        else:
            self.spent += seconds
            self._costs.append(seconds)

    @property
    def median_step(self) -> float | None:
        """Median duration of the newest steps without tracing, in seconds; ``None`` if there was none yet."""
        return statistics.median(self._plain) if self._plain else None

    def allows_another(self, now: float, *, outdated: bool = False) -> bool:
        """Return whether the budget allows another trace of the expected cost.

        ``outdated``: True if the kept trace no longer describes what the run does.
        """
        if self._since < SPACING:
            return False
        another = statistics.fmean(self._costs) if self._costs else 0.0
        with_another = self.spent + another
        elapsed = 0.0 if self._started is None else now - self._started
        if with_another <= _USED * self._share * elapsed:
            return True
        early = self._since >= _EARLY_SPACING and 2 * (self._last_traced - 1) <= self._steps
        if early and another <= _EARLY_SHARES * self._share * elapsed:
            return True
        return (early or outdated) and with_another <= self._share * max(elapsed, _LEAST_SECONDS)

"""Cost of a session's traces, measured by the durations of steps."""

from __future__ import annotations

import time
from collections.abc import Callable

from memlog.tracer.schedule.budget import Budget


class StepCosts:
    """Durations of traced and untraced steps. They decide whether the next step may be traced.

    Args:
        share: Share of training time that tracing may cost, 0 to 1; 0: trace only on request.

    Attributes:
        steps: Number of steps so far.
        budget: Time of training and of tracing since the first step or trace.
    """

    def __init__(self, share: float) -> None:
        self.steps = 0
        self.budget = Budget(share)
        self._share = share
        self._step_began = 0.0
        self._trace_began: float | None = None
        self._traced_at = 0
        self._own = self._once = 0.0
        self._cut = False

    def seconds(self) -> tuple[float, float]:
        """Return the seconds that later traces have cost, and the seconds that the first two have cost."""
        return self.budget.spent, self.budget.set_up

    def step_ended(self, now: float) -> None:
        self.steps += 1
        self.budget.begin(now)

    def plain_step(self, now: float) -> None:
        """Record the duration of a step. Do nothing if a part of the step was traced."""
        if self._trace_began is None and self._step_began:
            self.budget.plain_step(now - self._step_began)

    def step_begins(self) -> None:
        self._step_began = time.perf_counter()

    def window_opened(self, began: float, searching: float) -> None:
        """Record the start of a traced step: the begin of the step if known, else ``began``.

        Args:
            began: Time at which memlog began to open the window.
            searching: Seconds of the search for the model, which later windows do not repeat.
        """
        self._trace_began = self._step_began or began
        self._traced_at = self.steps
        self._own, self._once, self._cut = 0.0, searching, False
        self.budget.begin(self._trace_began)

    def window_closed(self, recording: float, closing: float, *, cut: bool) -> None:
        """Record the cost of a trace.

        Args:
            recording: Seconds that memlog's own code took in the window and for opening it.
            closing: Seconds that closing and analysing the window took.
            cut: True if the window stopped recording because it reached its limit in seconds.
        """
        self._own, self._cut = recording + closing, cut

    def window_failed(self, seconds: float, now: float) -> None:
        """Record ``seconds``, the cost of a trace that failed."""
        self.budget.begin(now)
        self.budget.charge(seconds)

    def forget_step(self) -> None:
        """Ignore the duration of the current step. Call this when the trace of the step is abandoned."""
        self._trace_began = None
        self._step_began = 0.0

    def settle(self) -> None:
        """Record the time of the last trace, from the begin of its first step to now.

        Call this after the trace. Do nothing if there was no trace, or if its time is recorded already.
        """
        began, self._trace_began = self._trace_began, None
        if began is not None:
            self.budget.traced_step(
                time.perf_counter() - began,
                self._own,
                self.steps - self._traced_at,
                once=self._once,
                cut=self._cut,
            )

    def may_trace(self, now: float, *, outdated: Callable[[], bool]) -> bool:
        """Return whether the next step may be traced.

        ``outdated``: Function that returns whether the kept trace no longer describes what the run does.
        """
        if not self._share:
            return False
        return self.budget.allows_another(now) or (
            self.budget.allows_another(now, outdated=True) and outdated()
        )

"""Time budget of tracing, and a session's open window with the limits beyond which it is abandoned."""

from __future__ import annotations

import math
import statistics
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from typing import Any, Final

from memlog._internal import current_session
from memlog._internal.diagnostics import Diagnostics

SPACING = 20
"""Minimum number of steps without tracing between two traces, from the third trace on. If the durations of
steps vary, a part of the cost can't be measured. Only this limit then bounds that part."""
AT_START = 10.0
"""Seconds of training of which the first two traces may use the share at once, 0.1 s with the default share.
So tracing keeps to its share in every run that is not shorter than this."""
SET_UP = 2
"""Number of first traces that need not be earned within `AT_START`."""
LEAST_PART = 0.25
"""Least part of a step that the first trace is expected to cover. Otherwise it waits until the run has earned
more."""
PER_MODULE = {"cpu": 2e-3, "accelerator": 0.5e-3}
"""Seconds that the first trace takes for each module of a model, as measured with transformers."""

_USED = 0.6
"""Fraction of the earned time that traces after the first two may be expected to use. The remainder is left
for what a trace may take longer, and for costs that can't be measured, such as emptied caches."""
_SEEN = 0.5
"""Fraction of a trace's cost that memlog's own code takes. torch's calls of this code take the remainder.
Measured were 0.45 to 0.65."""
_RECORDING = 0.8
"""Fraction of memlog's own time in a trace that may be used while it records. To close and analyse the window
takes a quarter of that."""
_PLAIN_STEPS = 32
"""Number of newest steps without tracing. The median of their durations is the usual duration of a step."""
_NEWEST = 8
"""Number of newest traces. The mean of their costs is the expected cost of the next trace."""
_MORE = 2.0
"""Factor from the cost of a trace that was cut to the expected cost of the next one."""


class Budget:
    """Account of the cost of tracing.

    A plain step is a step without tracing. The cost of a trace is its duration minus the median duration of
    the newest plain steps, but at least the time that memlog's own code took. Before the first plain step,
    the cost is estimated from that time. All traces count, the first one included. A run earns ``share`` of
    its time. A trace begins if the run has earned its expected cost and the cost of all traces before it.
    Only the first two may begin earlier, with the share of `AT_START`: most users want to see the first step,
    and the first step in which the optimizer has its state.

    ``share``: Share of training time that tracing may cost, 0 to 1.

    Attributes:
        spent: Seconds that tracing has cost so far, without set-up.
        set_up: Seconds that the first two traces and the search for the model have cost.
        search_due: Seconds that the search for the model is expected to take at the next trace; 0 if there is
            nothing to search.
    """

    def __init__(self, share: float) -> None:
        self.spent = self.set_up = self.search_due = 0.0
        self._share = share
        self._started: float | None = None
        self._plain: deque[float] = deque(maxlen=_PLAIN_STEPS)
        self._costs: deque[float] = deque(maxlen=_NEWEST)
        self._since = self._traced = 0
        self._spacing = SPACING
        self._expected = 0.0

    def begin(self, now: float) -> None:
        """At the first call, set the start of training. ``now`` is in seconds of any steady clock."""
        self._started = now if self._started is None else self._started

    def plain_step(self, seconds: float) -> None:
        self._plain.append(seconds)
        self._since += 1

    def traced_step(self, seconds: float, own: float, steps: int = 1, *, cut: bool = False) -> None:
        """Record a trace.

        Args:
            seconds: Seconds from the end of the step before the trace to the end of memlog's work on it.
            own: Seconds of processor time that memlog's own code took.
            steps: Number of steps in the trace.
            cut: True if the trace covers a part of the steps because it reached its limit.
        """
        usual = self.median_step
        cost = own / _SEEN if usual is None else max(seconds - steps * usual, own)
        if self._traced < SET_UP:
            # The first trace also loads code of torch, which later ones find loaded.
            self.set_up += cost
            self._costs.clear()
        else:
            self.spent += cost
        self._traced += 1
        self._since = 0
        self._spacing = 1 if self._traced < SET_UP else SPACING
        # A trace that was cut shows only that a whole one costs more.
        if cut:
            self._costs.clear()
        self._costs.append(max(_MORE * cost, self._expected) if cut else cost)

    def expect(self, seconds: float, now: float) -> bool:
        """Note what the first trace is expected to cost. Return whether it must wait until that is earned."""
        self._expected = seconds
        if LEAST_PART * seconds <= self._left(now):
            return False
        self._costs.append(seconds)
        self._spacing = 1
        return True

    @property
    def is_first(self) -> bool:
        """True if there was no trace yet."""
        return not self._traced

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
        """Return the seconds that memlog's own code may take in the window of a trace that begins now."""
        return _RECORDING * _SEEN * self._left(now)

    def covers(self, search: float, first: float, now: float) -> bool:
        """Return whether a search for the model may begin now, so that the trace after it can still be made.

        ``search``: Seconds that the search is expected to take. ``first``: Seconds that a first trace would
        take. Before it, the search may take up to twice the expected time: nothing has shown how fast the
        machine is.
        """
        if self.is_first:
            return 2 * search + first <= self._left(now)
        return search + self._another <= self._left(now)

    def allows_another(self, now: float, *, outdated: bool = False) -> bool:
        """Return whether the budget allows another trace of the expected cost.

        ``outdated``: True if the kept trace no longer describes what the run does. The trace may then use all
        of the earned time.
        """
        if self._since < self._spacing:
            return False
        # The second trace is made without the search, if both together cost too much.
        search = 0.0 if self._traced < SET_UP else self.search_due
        used = 1.0 if outdated or self._traced < SET_UP else _USED
        return self.spent + self.set_up + self._another + search <= used * self._may_cost(now)

    @property
    def _another(self) -> float:
        """Seconds that the next trace is expected to cost, without a search."""
        return statistics.fmean(self._costs) if self._costs else 0.0

    def _left(self, now: float) -> float:
        """Return the seconds that a trace that begins now may cost."""
        return max(self._may_cost(now) - self.spent - self.set_up, 0.0)

    def _may_cost(self, now: float) -> float:
        """Return the seconds that all traces together may have cost by now."""
        elapsed = 0.0 if self._started is None else now - self._started
        return self._share * (max(elapsed, AT_START) if self._traced < SET_UP else elapsed)


def _expected_seconds(modules: int, device: str) -> float:
    return PER_MODULE.get(device, PER_MODULE["accelerator"]) * modules


class StepCosts:
    """Durations of traced and untraced steps. They decide whether the next step may be traced.

    Args:
        share: Share of training time that tracing may cost, 0 to 1; 0: trace only on request.

    Attributes:
        steps: Number of steps so far.
        budget: Time of training and of tracing since the first step or trace.
        untraced: Reason why the first trace waits, with the remedy; empty if it does not wait.
    """

    def __init__(self, share: float) -> None:
        self.steps = 0
        self.budget = Budget(share)
        self.untraced = ""
        self._share = share
        self._step_began = 0.0
        self._trace_began: float | None = None
        self._traced_at = 0
        self._own = self._searching = 0.0
        self._cut = False

    def told(self) -> tuple[float, float, str]:
        """Return the seconds of later traces, the seconds of the first two, and `untraced`."""
        return self.budget.spent, self.budget.set_up, self.untraced

    def step_ended(self, now: float) -> None:
        self.steps += 1
        self.budget.begin(now)

    def plain_step(self, now: float) -> None:
        """Record the duration of a step. Do nothing if a part of the step was traced."""
        if self._trace_began is None and self._step_began:
            self.budget.plain_step(now - self._step_began)

    def step_begins(self) -> None:
        self._step_began = time.perf_counter()

    def searched(self, seconds: float, due: float) -> None:
        """Record a search for the model, before the window opens for which it was made.

        Args:
            seconds: Seconds that the search took.
            due: As `Budget.search_due`.
        """
        self._searching = seconds
        self.budget.set_up += seconds
        self.budget.search_due = due

    def window_opened(self, began: float) -> None:
        """Record the start of a traced step: the begin of the step if known, else ``began``.

        ``began``: Time at which memlog began to open the window.
        """
        self._trace_began = self._step_began or began
        self._traced_at = self.steps
        self._own, self._cut = 0.0, False
        self.untraced = ""
        self.budget.begin(self._trace_began)

    def window_closed(self, recording: float, closing: float, *, cut: bool) -> None:
        """Record the cost of a trace.

        Args:
            recording: Seconds that memlog's own code took in the window and for opening it, without the
                search for the model.
            closing: Seconds that closing and analysing the window took.
            cut: True if the window stopped recording because it reached its limit in seconds.
        """
        self._own, self._cut = recording + closing, cut

    def waits(self, modules: int, device: str, now: float) -> bool:
        """Return whether the first trace of a model must wait until the run has earned it.

        Args:
            modules: Number of modules of the model.
            device: Type of the model's device, such as ``cpu``.
            now: The current time.
        """
        expected = _expected_seconds(modules, device)
        self.budget.begin(now)
        if not self.budget.expect(expected, now):
            return False
        seconds = self.budget.set_up + self.budget.search_due + expected
        due = seconds / self._share
        self.untraced = (
            f"tracing this model's {modules:,} modules is expected to take {expected:.2g} s, which "
            f"budget={self._share:g} allows after {due:,.0f} s of training; {self._remedy(seconds)}"
        )
        return True

    def covers(self, search: float, modules: int, device: str, now: float) -> bool:
        """Return whether a search for the model may begin now, as `Budget.covers`.

        ``search``: Seconds that the search is expected to take. The other arguments are as for `waits`.
        """
        self.budget.begin(now)
        return self.budget.covers(search, _expected_seconds(modules, device), now)

    def _remedy(self, seconds: float) -> str:
        """Return how to trace all of the first step. ``seconds``: Expected cost, with all set-up."""
        share = seconds / AT_START
        digit = 10.0 ** math.floor(math.log10(share))
        # Rounded up, so that the whole step is traced with this budget.
        rounded = math.ceil(round(share / digit, 3)) * digit
        enough = f"{rounded:g} or more" if rounded < 1 else "1"
        launched = current_session.launch()
        by_option = (
            launched is not None and launched.layers and math.isclose(launched.budget, self._share)
        )
        if by_option:
            if share > 1:
                return "no budget is enough for the whole first step"
            return f"for the first step, pass --budget {enough} to memlog run"
        by_budget = "" if share > 1 else f"set budget={enough}, or "
        return f"for the first step, {by_budget}call session.snapshot() before it"

    def window_failed(self, seconds: float, now: float) -> None:
        """Record ``seconds``, the cost of a trace that failed."""
        self.budget.begin(now)
        self.budget.charge(seconds)

    def window_abandoned(self, recording: float) -> None:
        """Record the cost of a trace that is abandoned, and ignore the duration of its step.

        ``recording``: As in `window_closed`.
        """
        self._trace_began = None
        self._step_began = 0.0
        self.budget.charge(recording / _SEEN)

    def settle(self) -> None:
        """Record the time of the last trace, from the begin of its first step to now.

        Call this after the trace. Do nothing if there was no trace, or if its time is recorded already.
        """
        began, self._trace_began = self._trace_began, None
        if began is not None:
            self.budget.traced_step(
                time.perf_counter() - began - self._searching,
                self._own,
                self.steps - self._traced_at,
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


SKIPPED = "trace_skipped"
"""Name under which skipped traces are counted."""
_LONGEST = 32
"""Maximum number of steps between two attempts to trace a step."""


class RetryPolicy:
    """Request to trace a step, and the number of steps to wait after a failed attempt.

    Attributes:
        awaits_compiler: True while tracing waits for ``torch.compile`` to finish.
    """

    def __init__(self) -> None:
        self.awaits_compiler = False
        self._wanted = False
        self._disabled = False
        self._failures = 0
        self._pause = 0

    def want(self) -> None:
        """Request a trace of the next step."""
        self._wanted = True
        self._disabled = False
        self._pause = 0

    def done(self) -> None:
        """Clear the request. Call this when a trace has started, or failed for good."""
        self._wanted = self.awaits_compiler = False
        self._failures = 0

    def postpone(self) -> None:
        """Let some steps pass before the next attempt. Each further failure doubles the number of steps."""
        self._pause = min(2**self._failures, _LONGEST) - 1
        self._failures += 1

    def disable(self) -> None:
        """Stop tracing steps until the next call of `want`."""
        self.done()
        self._disabled = True

    def next_step(self, *, allowed: bool) -> bool:
        """Return whether to try to trace the step that begins.

        ``allowed``: True if the step may be traced without a request.
        """
        if self._disabled:
            return False
        if self._pause:
            self._pause -= 1
            return False
        self._wanted = self._wanted or allowed
        return self._wanted


def count_skipped(diagnostics: Diagnostics, why: str, *, for_good: bool = False) -> None:
    """Count a step that could not be traced. Log the reason the first time.

    ``for_good``: True if tracing stops, so that no further step will be traced.
    """
    first = f"a step could not be traced ({why}); memlog counts how often that happens"
    diagnostics.drop(SKIPPED, f"no step is traced from now on: {why}" if for_good else first)


_MOST_CALLS: Final = 256
"""Maximum number of calls of the module whose call opened the window. Beyond the maximum, the window is
abandoned, because the step is too long or has no end."""
MOST_EVENTS = 1_000_000
"""Maximum number of events in a window. Beyond the maximum, the window is abandoned."""
_MOST_STEPS: Final = 30.0
"""Factor. A window is abandoned after one second plus this factor times the usual duration of a step."""
LIMITS: Final = (
    f"{_MOST_CALLS} calls of the model, {MOST_EVENTS:,} events or {_MOST_STEPS:g} usual steps"
)
ATTEMPT_FAILED: Final = "an allocation failed in it, and the program went on"


class OpenWindow:
    """Window that opens when this thread calls ``module`` with ``inputs``.

    ``model``: Model that the user has named, if any. ``roots``: Root modules, at least one. ``known``:
    Optimizers that tell, beside ``optimizers``, which networks are trained. ``usual_step``: Usual duration of
    a step without tracing, in seconds; ``None`` if unknown. ``most_seconds``: Seconds that memlog's own code
    may take; ``None``: no limit.

    Attributes:
        thread: Traced thread. This thread opened the window.
        allocation_failed: True if an allocation on a device failed in the window.
    """

    def __init__(
        self,
        module: Any,
        inputs: Any,
        *,
        model: Any,
        roots: Sequence[Any],
        optimizers: Sequence[Any],
        known: Sequence[Any],
        diagnostics: Diagnostics,
        usual_step: float | None,
        most_seconds: float | None,
    ) -> None:
        # Imported here: it loads parts of torch that most users of sessions never need.
        from memlog.tracer.window import TraceWindow  # noqa: PLC0415

        began = time.thread_time()
        self.window = TraceWindow(
            model,
            others=roots,
            optimizers=optimizers,
            known=known,
            diagnostics=diagnostics,
            types=True,
            most_events=MOST_EVENTS,
            most_seconds=most_seconds,
            read_users_history=False,
        )
        choice, device = self.window.choice, self.window.torch_device
        if choice.engine == "sampler" and device.type in ("cuda", "xpu"):
            diagnostics.say_once(
                "traced_by_statistics",
                "traced steps show neither categories nor what a layer allocated, and their peaks are lower "
                f"bounds: {choice.why}",
            )
        self.window.start()
        self.window.module_begins(module, inputs)
        self.window.took(time.thread_time() - began)
        self.thread = threading.current_thread()
        self.allocation_failed = False
        self._module, self._calls = id(module), 0
        self._deadline = time.perf_counter() + (
            1.0 + _MOST_STEPS * usual_step if usual_step else float("inf")
        )

    def exceeds_limits(self, module: Any) -> bool:
        """Count a module call, and return whether the window exceeds a limit."""
        self._calls += id(module) == self._module
        late = time.perf_counter() > self._deadline
        return self._calls > _MOST_CALLS or self.window.overflowed or late


class WindowSlot:
    """Holder of a session's open window. A session has at most one open window.

    Hooks open and close the window on any thread.

    Attributes:
        window: The open window; ``None`` if none is open.
        ended: True if no further window can open.
    """

    def __init__(self) -> None:
        self.window: OpenWindow | None = None
        self.ended = False
        # Reentrant: a signal handler may run on the thread that holds the lock.
        self._lock = threading.RLock()
        self._opening = False

    def open(self, make: Callable[[], OpenWindow | None], failed: Callable[[], object]) -> None:
        """Open a window, unless one is open or another thread is opening one.

        Args:
            make: Function that opens a window and returns it. It returns ``None`` if the window could not
                open.
            failed: Function that is called if the window could not open.
        """
        with self._lock:
            if self._opening or self.ended or self.window is not None:
                return
            self._opening = True
        try:
            # Outside the lock: opening a window takes long.
            self.window = make()
        finally:
            self._opening = False
            if self.window is None:
                failed()

    def if_free(self, act: Callable[[], object]) -> None:
        """Call ``act`` if no window is open and none is being opened."""
        with self._lock:
            if self.window is None and not self._opening:
                act()

    def take(self, *, any_thread: bool) -> OpenWindow | None:
        """Remove the open window and return it, so that only the caller closes it.

        Return ``None`` if no window is open. If ``any_thread`` is false, also return ``None`` if another
        thread opened the window.
        """
        with self._lock:
            opened = self.window
            if opened is None or not (any_thread or opened.thread is threading.current_thread()):
                return None
            self.window = None
        return opened

    def end(self) -> None:
        with self._lock:
            self.ended = True

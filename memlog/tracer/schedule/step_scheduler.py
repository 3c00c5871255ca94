"""Tracing a step of a running session now and then, by itself.

A window opens as the first module of a training step is called, and closes when the step is over: when every
optimizer that takes part has stepped (`memlog.tracer.schedule.iteration`). The first step of all is traced:
a job that does not fit dies there. So is the next but one, in which the optimizer's state is there from the
start; later ones are as often as the budget allows. Since a window opens in one hook and closes in another,
it opens only where that is safe (`memlog.tracer.window.may_open`), and what was skipped is counted. It is
bounded, too: where no step comes to an end, as in evaluation or while experience is gathered, it is
abandoned.
"""

from __future__ import annotations

import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

from memlog._internal.diagnostics import Diagnostics
from memlog.events import Event
from memlog.tracer.schedule.budget import DEFAULT_SHARE, Budget
from memlog.tracer.schedule.frozen_modules import Forerunner
from memlog.tracer.schedule.iteration import Rhythm
from memlog.tracer.schedule.kept_trace import FORERUNNER_MISSED, Findings, Found
from memlog.tracer.schedule.retry import RetryPolicy
from memlog.tracer.schedule.top_modules import Tops
from memlog.tracer.schedule.trace_event import trace_event

if TYPE_CHECKING:
    from memlog.trace.records import RecordedTrace
    from memlog.tracer.hooks.first_call import Calls
    from memlog.tracer.hooks.module_hooks import OptimizersHeard
    from memlog.tracer.window import TraceWindow

_STEADY = 3
"""Steps after which what was given to ``torch.compile`` has been compiled. A hook that is there while it is
costs a second compilation."""
_MOST_CALLS = 256
"""Of the module that a window opened at: with more of them no step ends, or one that is too long."""
_MOST_EVENTS = 1_000_000
_MOST_STEPS = 30.0
"""A window is open for no longer than so many usual steps, and a second."""
_SET_UP = 2
"""Steps that are traced whatever they cost: the first, and the next but one."""


class PeriodicTracer:
    """Traces steps of one session. Everything is called on trainers' threads, and nothing raises.

    Args:
        kept: Where the events of the step that tells most are left, the worst of those that are alike: the
            helper process makes a flame graph of them.
        publish: Takes the trace events.
        diagnostics: Counts errors, and windows that could not open.
        model: Whose layers; ``None``: the modules at the top are found as they are called, and remembered.
        share: Of training time that tracing may cost, 0 to 1; 0: what is asked for is traced, and no more.
    """

    def __init__(
        self,
        kept: Path,
        publish: Callable[[Event], object],
        diagnostics: Diagnostics,
        model: Any = None,
        share: float = DEFAULT_SHARE,
    ) -> None:
        self._findings = Findings(kept, publish)
        self._diagnostics = diagnostics
        self._tops = Tops(model)
        self._share = share
        self._budget: Budget | None = None
        # Who may change what follows: windows open and close on any thread, in hooks, and signals interrupt.
        self._lock = threading.RLock()
        self._calls: Calls | None = None
        self._opening = False
        self._window: TraceWindow | None = None
        self._thread: threading.Thread | None = None
        self._finished = False
        self._opened = self._stepped = self._deadline = 0.0
        self._since: float | None = None
        self._rhythm = Rhythm(self._findings.optimizer_begins, self._optimizer_ended)
        self._top = 0
        self._top_calls = 0
        self._steps = self._opened_at = 0
        self._last: int | None = None
        self._retry = RetryPolicy()
        self._forerunner = Forerunner()
        self._traced = 0
        self._skipped = 0
        self._held: OptimizersHeard | None = None
        self.want()

    def want(self) -> None:
        """Traces the next step, whatever the budget says."""
        self._retry.want()
        with self._diagnostics.contained("waiting for a step to trace"):
            self._wait_for_a_call()

    @property
    def tracing(self) -> bool:
        """Whether the step that is at work is traced."""
        return self._window is not None

    def after_step(self, step: int) -> None:
        """A step is over."""
        now = time.perf_counter()
        self._steps += 1
        self._last = step
        self._rhythm.clock_stepped()
        budget = self._begin_budget(now)
        with self._diagnostics.contained("keeping what was traced"):
            self._findings.step_ended()
        if self._window is not None:
            if self._rhythm.whole or self._rhythm.hopeless:
                self._close(now)
        elif self._since is None and self._stepped:
            budget.plain_step(now - self._stepped)
        with self._diagnostics.contained("waiting for a step to trace"):
            self._look_at_waiting()
            if self._window is None:
                self._settle(now)
                if self._retry.next_step(allowed=self._may_trace(budget, now)):
                    self._forerunner.step_begins()
                    self._wait_for_a_call()
        self._stepped = time.perf_counter()

    def _may_trace(self, budget: Budget, now: float) -> bool:
        if not self._share:
            return False
        if 0 < self._traced < _SET_UP:
            return self._steps > self._opened_at + 1
        return budget.allows_another(now) or (
            budget.allows_another(now, lacking=True) and self._rhythm.lacks(self._findings.members)
        )

    def _optimizer_ended(self, optimizer: Any) -> None:
        """The last that takes part in a step may end after the clock has."""
        self._findings.optimizer_ended(optimizer)
        if self._window is not None and self._rhythm.steps and self._rhythm.whole:
            self._close(time.perf_counter())

    def _settle(self, now: float) -> None:
        """What was traced since a step of the clock ended is paid for, whole steps of it."""
        since, self._since = self._since, None
        if since is not None and self._budget is not None:
            between = time.perf_counter() - now
            self._budget.traced_step(
                now - since,
                between,
                self._steps - self._opened_at,
                setting_up=self._traced <= _SET_UP,
            )

    def cost(self) -> tuple[float, float]:
        """Seconds that traced steps have taken beyond others, and the first ones, which set it up."""
        budget = self._budget
        return (budget.spent(), budget.set_up) if budget is not None else (0.0, 0.0)

    def finish(self, *, failed: bool = True) -> None:
        """The session is over; the events of a step that ``failed`` midway are kept all the same."""
        with self._lock:
            self._finished = True
        self._stop_listening()
        if self._window is not None:
            self._close(time.perf_counter(), whosever=True, failed=failed)
        elif self._retry.late:
            self._skip("the run ended before torch.compile was done with the model")
        with self._diagnostics.contained("keeping what was traced"):
            self._findings.finish(lacking=self._rhythm.lacks(self._findings.members))
        if self._held is not None:
            self._held.remove()
        leaving = sys.modules.get("memlog.tracer.hooks.deferred_removal")
        if leaving is not None:
            leaving.try_to_leave()

    # Before a window: waiting for a module to be called.

    def _wait_for_a_call(self) -> None:
        """Hears of the next module that is called for training, once torch is there."""
        torch = sys.modules.get("torch")
        if torch is None or self._finished or not self._may_wait():
            return
        from memlog.tracer.hooks.first_call import Calls  # noqa: PLC0415 - torch is there already

        with self._lock:
            if self._calls is None and self._window is None and not self._opening:
                self._calls = Calls(self._called, self._diagnostics)

    def _may_wait(self) -> bool:
        """A hook of ours must be no reason to compile anything again.

        Where the compiler is in use that is sure of a compiled module alone, which calls global hooks outside
        what is compiled, and only once it is. On the CPU nobody would see anything inside it.
        """
        if not _compiler_in_use():
            return True
        from memlog.tracer.engines.selection import are_compiled, device_of  # noqa: PLC0415 - they load parts of torch

        known = self._tops.known()
        if not are_compiled(known) or device_of(known, None).type == "cpu":
            self._retry.never()
            self._skip(
                "torch.compile is in use, whose graphs hide layers and are made anew for hooks"
            )
            return False
        self._retry.late = self._steps < _STEADY
        return not self._retry.late

    def _look_at_waiting(self) -> None:
        """Something may have been given to the compiler since."""
        waits = self._calls is not None and not self._calls.resting and self._window is None
        if waits and not self._may_wait():
            self._listen_no_more()

    def _called(self, module: Any, inputs: Any) -> None:
        """A module is called, outside compiled code."""
        if self._window is not None:
            self._keep_within_bounds(module)
        elif not self._may_wait():
            self._listen_no_more()  # before what is called here gets compiled
        elif self._calls is not None and (
            self._tops.train(module) or self._forerunner.comes(module)
        ):
            if not self._begin_opening():
                return
            try:
                self._open(module, inputs)
            finally:
                self._opening = False
                if self._window is None:
                    self._stop_listening()

    def _begin_opening(self) -> bool:
        """Whether it is this thread that opens the window."""
        with self._lock:
            if self._opening or self._finished or self._window is not None:
                return False
            self._opening = True
            return True

    def _listen_no_more(self) -> None:
        """Without what was compiled meanwhile being compiled again, as it would be without the hook."""
        calls = self._calls
        if calls is not None and calls.compiled_since:
            calls.resting = True
        else:
            self._stop_listening()

    def _stop_listening(self) -> None:
        with self._lock:
            calls, self._calls = self._calls, None
        if calls is not None:
            calls.remove()

    # The window.

    def _open(self, module: Any, inputs: Any) -> None:
        begun = time.perf_counter()
        try:
            # Imported here: they load parts of torch that most of its users never need.
            from memlog.tracer.hooks.module_hooks import OptimizersHeard  # noqa: PLC0415
            from memlog.tracer.window import TraceWindow, may_open  # noqa: PLC0415

            if not may_open():
                self._retry.put_off()
                self._skip(
                    "another torch dispatch mode, a transformation of torch.func, a compiled graph or a "
                    "backward pass was active"
                )
                return
            if self._held is None:
                self._held = OptimizersHeard(self._rhythm, self._diagnostics)
            first, *others = self._tops.known() or [module]
            window = TraceWindow(
                first,
                others=others,
                optimizers=self._rhythm.optimizers(),
                diagnostics=self._diagnostics,
                types=True,
                most_events=_MOST_EVENTS,
            )
            window.start()
            window.module_begins(module, inputs)
        except Exception as error:  # noqa: BLE001 - training goes on
            self._diagnostics.fault("beginning to trace a step", error)
            self._retry.begun()
            self._skip("it could not begin")
            now = time.perf_counter()
            self._begin_budget(now).charge(now - begun, setting_up=not self._traced)
            return
        self._thread, self._top, self._top_calls = threading.current_thread(), id(module), 0
        self._rhythm.begin()
        self._forerunner.begin()
        self._opened = time.perf_counter()
        self._opened_at = self._steps
        self._since = self._stepped or begun
        usual = self._budget.usual if self._budget is not None else None
        self._deadline = self._opened + (1.0 + _MOST_STEPS * usual if usual else float("inf"))
        self._retry.begun()
        self._window = window

    def _keep_within_bounds(self, module: Any) -> None:
        """A window whose step does not end costs something at every operation."""
        window = self._window
        if window is None or self._thread is not threading.current_thread():
            return
        self._top_calls += id(module) == self._top
        now = time.perf_counter()
        if self._top_calls > _MOST_CALLS or window.overflowed or now > self._deadline:
            self._abandon(now)

    def _take_window(self, *, whosever: bool) -> TraceWindow | None:
        """The open window, to be closed by the caller alone; another thread's step is none of ours."""
        with self._lock:
            window, thread = self._window, self._thread
            mine = thread is threading.current_thread()
            if window is None or not (mine or whosever):
                return None
            self._window = self._thread = None
        return window

    def _close(self, now: float, *, whosever: bool = False, failed: bool | None = None) -> None:
        """The step is over, or (where ``failed`` says why) the session."""
        if self._window is not None and self._window.overflowed:
            self._abandon(now)
            return
        if self._thread is not None and not self._thread.is_alive() and not whosever:
            self._abandon(now)  # what trains now is another thread
            return
        thread = self._thread
        window = self._take_window(whosever=whosever)
        if window is None:
            return
        self._stop_listening()
        self._traced += 1
        with self._diagnostics.contained("tracing a step"):
            try:
                trace = window.stop()
            finally:
                self._leave(window)
            self._tops.remember(window.tops(), thread)
            self._tell(trace, window, failed=failed)

    def _abandon(self, now: float) -> None:
        window = self._take_window(whosever=True)
        if window is None:
            return
        self._stop_listening()
        self._forerunner.forget()
        with self._diagnostics.contained("abandoning a traced step"):
            try:
                window.abandon()
            finally:
                self._leave(window)
        self._skip(
            f"its end did not come within {_MOST_CALLS} calls of the model, {_MOST_EVENTS:,} events or "
            f"{_MOST_STEPS:g} usual steps"
        )
        self._since = None
        self._stepped = 0.0  # nor is what began as a traced step a plain one
        spent = time.perf_counter() - self._opened
        self._begin_budget(now).charge(spent, setting_up=not self._traced)

    def _leave(self, window: TraceWindow) -> None:
        from memlog.tracer.hooks.deferred_removal import leave_later  # noqa: PLC0415 - torch is there already

        leave_later(window)

    def _begin_budget(self, now: float) -> Budget:
        if self._budget is None:
            self._budget = Budget(self._share, now)
        return self._budget

    # What it came to.

    def _tell(self, trace: RecordedTrace, window: TraceWindow, *, failed: bool | None) -> None:
        rhythm, findings, over = self._rhythm, self._findings, failed is None
        missed = self._forerunner.missed
        found = Found(
            trace,
            trace_event(trace.result, self._last if over else None, self._skipped),
            rhythm.members(),
            whole=over and rhythm.whole,
            warm=not rhythm.cold,
        )
        if not over or rhythm.known:
            if found.whole and missed:
                told = found.of_a_part(FORERUNNER_MISSED)
            else:
                told = found if found.whole or failed else found.of_a_part()
            findings.add(told, lacking=rhythm.lacks(findings.members))
        else:
            by_hand = not rhythm.optimizers()  # the user says what a step is
            findings.add_undecided(found, whole=by_hand or rhythm.steps_all_of(window.tops()))

    def _skip(self, why: str) -> None:
        self._skipped += 1
        self._diagnostics.drop(
            "trace_skipped",
            f"a step could not be traced ({why}); how often that happens is counted",
        )


def _compiler_in_use() -> bool:
    if "torch._dynamo" not in sys.modules:
        return False
    from memlog.tracer.torch_private import compiler_in_use  # noqa: PLC0415 - torch is there already

    return compiler_in_use()

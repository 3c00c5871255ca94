"""Tracing a step of a running session now and then, by itself.

A window opens as the first module of a training step is called, and closes when the step is over. The first
step of all is traced: a job that does not fit dies there. Later ones are as often as the budget allows. Since
a window opens in one hook and closes in another, it opens only where that is safe
(`memlog.tracer.window.may_open`), and what was skipped is counted. It is bounded, too: where no step comes to
an end, as in evaluation or while experience is gathered, it is abandoned.
"""

from __future__ import annotations

import itertools
import sys
import threading
import time
import weakref
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec

from memlog.events import Event
from memlog.events import Trace as TraceEvent
from memlog.files import replacing
from memlog.health import Health
from memlog.tracer.budget import DEFAULT_SHARE, Budget
from memlog.tracer.event import trace_event
from memlog.tracer.turns import Turns

if TYPE_CHECKING:
    from memlog.analysis.trace.records import Trace
    from memlog.tracer.calls import Calls
    from memlog.tracer.window import Window

_WORSE = 1.01
"""By so much a peak must exceed the worst one's for its step to take its place."""
_STEADY = 3
"""Steps after which what was given to ``torch.compile`` has been compiled. A hook that is there while it is
costs a second compilation."""
_MOST_CALLS = 256
"""Of the module that a window opened at: with more of them no step ends, or one that is too long."""
_MOST_EVENTS = 1_000_000
_MOST_STEPS = 30.0
"""A window is open for no longer than so many usual steps, and a second."""
_MOST_PARAMETERS = 10_000
"""That are looked at, to find one that is trained."""


class PeriodicTracer:
    """Traces steps of one session. Everything is called on trainers' threads, and nothing raises.

    Args:
        worst: Where the events of the worst step so far are left: the helper process makes a flame graph of
            them.
        publish: Takes the trace events.
        health: Counts errors, and windows that could not open.
        model: Whose layers; ``None``: the modules at the top are found as they are called, and remembered.
        share: Of training time that tracing may cost, 0 to 1.
    """

    def __init__(
        self,
        worst: Path,
        publish: Callable[[Event], object],
        health: Health,
        model: Any = None,
        share: float = DEFAULT_SHARE,
    ) -> None:
        self._worst_file = worst
        self._publish = publish
        self._health = health
        self._model = model
        self._tops: list[weakref.ref[Any]] = []
        self._share = share
        self._budget: Budget | None = None
        # Who may change what follows: windows open and close on any thread, in hooks, and signals interrupt.
        self._lock = threading.RLock()
        self._calls: Calls | None = None
        self._opening = False
        self._window: Window | None = None
        self._thread: threading.Thread | None = None
        self._finished = False
        self._opened = self._opening_took = self._stepped = self._deadline = 0.0
        self._top = 0
        self._top_calls = 0
        self._steps = 0
        self._turns = Turns()
        self._worst = -1
        self._skipped = 0
        self._held: Any = None
        self.want()

    def want(self) -> None:
        """Traces the next step, whatever the budget says."""
        self._turns.want()
        with self._health.contained("waiting for a step to trace"):
            self._wait_for_a_call()

    @property
    def tracing(self) -> bool:
        """Whether the step that is at work is traced."""
        return self._window is not None

    def after_step(self, step: int) -> None:
        """A step is over."""
        now = time.perf_counter()
        self._steps += 1
        budget = self._begin_budget(now)
        if self._window is not None:
            self._close(step, now)
        elif self._stepped:
            budget.plain_step(now - self._stepped)
        with self._health.contained("waiting for a step to trace"):
            self._look_at_waiting()
            if self._turns.next_step(allowed=budget.allows_another(now)):
                self._wait_for_a_call()
        self._stepped = time.perf_counter()

    def finish(self) -> None:
        """The session is over; the events of a step that failed midway are kept all the same."""
        with self._lock:
            self._finished = True
        self._stop_listening()
        if self._window is not None:
            self._close(None, time.perf_counter(), whosever=True)
        elif self._turns.late:
            self._skip("the run ended before torch.compile was done with the model")
        if self._held is not None:
            self._held.remove()
        leaving = sys.modules.get("memlog.tracer.leaving")
        if leaving is not None:
            leaving.try_to_leave()

    # Before a window: waiting for a module to be called.

    def _wait_for_a_call(self) -> None:
        """Hears of the next module that is called for training, once torch is there."""
        torch = sys.modules.get("torch")
        if torch is None or self._finished or not self._may_wait():
            return
        from memlog.tracer.calls import Calls  # noqa: PLC0415 - torch is there already

        with self._lock:
            if self._calls is None and self._window is None and not self._opening:
                self._calls = Calls(self._called, self._health)

    def _may_wait(self) -> bool:
        """A hook of ours must be no reason to compile anything again.

        Where the compiler is in use that is sure of a compiled module alone, which calls global hooks outside
        what is compiled, and only once it is. On the CPU nobody would see anything inside it.
        """
        if not _compiler_in_use():
            return True
        from memlog.tracer.choose import are_compiled, device_of  # noqa: PLC0415 - they load parts of torch

        known = self._known()
        if not are_compiled(known) or device_of(known, None).type == "cpu":
            self._turns.never()
            self._skip(
                "torch.compile is in use, whose graphs hide layers and are made anew for hooks"
            )
            return False
        self._turns.late = self._steps < _STEADY
        return not self._turns.late

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
        elif self._calls is not None and self._trains(module):
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

    def _trains(self, module: Any) -> bool:
        """What has nothing to be trained, such as a transform of the data, does not begin a step.

        Being in the mode of evaluation says nothing: with its statistics frozen a model is trained in it.
        """
        import torch  # noqa: PLC0415 - it is there: a module of it is called

        if not torch.is_grad_enabled():
            return False
        parameters = itertools.chain.from_iterable(
            top.parameters() for top in (self._known() or [module])
        )
        return any(
            parameter.requires_grad for parameter in itertools.islice(parameters, _MOST_PARAMETERS)
        )

    def _known(self) -> list[Any]:
        """The modules at the top, as far as they are known: always in one order, so that names stay."""
        known = [self._model, *(top() for top in self._tops)]
        return [module for module in known if module is not None]

    def _remember(self, window: Window) -> None:
        """Modules without parameters are found anew each time, and parts of others are no top."""
        tops = [top for top in window.tops() if next(top.parameters(), None) is not None]
        parts = {id(part) for top in tops for part in top.modules() if part is not top}
        self._tops = [
            weakref.ref(top) for top in tops if top is not self._model and id(top) not in parts
        ]

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
            from memlog.tracer.hooks import hold_optimizer_hooks  # noqa: PLC0415
            from memlog.tracer.window import Window, may_open  # noqa: PLC0415

            if not may_open():
                self._turns.put_off()
                self._skip(
                    "another torch dispatch mode, a transformation of torch.func, a compiled graph or a "
                    "backward pass was active"
                )
                return
            if self._held is None:
                self._held = hold_optimizer_hooks()
            first, *others = self._known() or [module]
            window = Window(
                first, others=others, health=self._health, types=True, most_events=_MOST_EVENTS
            )
            window.start()
            window.module_begins(module, inputs)
        except Exception as error:  # noqa: BLE001 - training goes on
            self._health.fault("beginning to trace a step", error)
            self._turns.begun()
            self._skip("it could not begin")
            now = time.perf_counter()
            self._begin_budget(now).charge(now - begun)
            return
        self._thread, self._top, self._top_calls = threading.current_thread(), id(module), 0
        self._opened = time.perf_counter()
        self._opening_took = self._opened - begun
        usual = self._budget.usual if self._budget is not None else None
        self._deadline = self._opened + (1.0 + _MOST_STEPS * usual if usual else float("inf"))
        self._turns.begun()
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

    def _take_window(self, *, whosever: bool) -> Window | None:
        """The open window, to be closed by the caller alone; another thread's step is none of ours."""
        with self._lock:
            window, thread = self._window, self._thread
            mine = thread is threading.current_thread()
            if window is None or not (mine or whosever):
                return None
            self._window = self._thread = None
        return window

    def _close(self, step: int | None, now: float, *, whosever: bool = False) -> None:
        if self._window is not None and self._window.overflowed:
            self._abandon(now)
            return
        if self._thread is not None and not self._thread.is_alive() and not whosever:
            self._abandon(now)  # what trains now is another thread
            return
        window = self._take_window(whosever=whosever)
        if window is None:
            return
        self._stop_listening()
        with self._health.contained("tracing a step"):
            try:
                trace = window.stop()
            finally:
                self._leave(window)
            self._remember(window)
            self._tell(trace, step)
        if self._budget is not None:
            between = self._opening_took + time.perf_counter() - now
            # From the step before on, as a plain one is counted: what loads the batch is part of both.
            begun = self._stepped + self._opening_took if self._stepped else self._opened
            self._budget.traced_step(now - begun, between)

    def _abandon(self, now: float) -> None:
        window = self._take_window(whosever=True)
        if window is None:
            return
        self._stop_listening()
        with self._health.contained("abandoning a traced step"):
            try:
                window.abandon()
            finally:
                self._leave(window)
        self._skip(
            f"its end did not come within {_MOST_CALLS} calls of the model, {_MOST_EVENTS:,} events or "
            f"{_MOST_STEPS:g} usual steps"
        )
        self._begin_budget(now).charge(time.perf_counter() - self._opened)

    def _leave(self, window: Window) -> None:
        from memlog.tracer.leaving import leave_later  # noqa: PLC0415 - torch is there already

        leave_later(window)

    def _begin_budget(self, now: float) -> Budget:
        if self._budget is None:
            self._budget = Budget(self._share, now)
        return self._budget

    # What it came to.

    def _tell(self, trace: Trace, step: int | None) -> None:
        event = trace_event(trace.result, step, self._skipped)
        peak = trace.result.peak
        if peak is not None and peak > self._worst * _WORSE:
            self._worst = peak
            self._keep(trace, event)
        self._publish(event)

    def _keep(self, trace: Trace, event: TraceEvent) -> None:
        """Leaves the events to the helper process: making a graph of them takes longer than a step."""
        with replacing(self._worst_file.parent, self._worst_file.name) as file:
            file.write(msgspec.msgpack.encode((event, trace)))

    def _skip(self, why: str) -> None:
        self._skipped += 1
        self._health.drop(
            "trace_skipped",
            f"a step could not be traced ({why}); how often that happens is counted",
        )


def _compiler_in_use() -> bool:
    if "torch._dynamo" not in sys.modules:
        return False
    from memlog.tracer.private import compiler_in_use  # noqa: PLC0415 - torch is there already

    return compiler_in_use()

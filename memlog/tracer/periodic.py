"""Tracing a step of a running session now and then, by itself.

A window opens as the first module of a training step is called, and closes when the step is over. The first
step of all is traced: a job that does not fit dies there. Later ones are as often as the budget allows. Since
a window opens in one hook and closes in another, it opens only where that is safe
(`memlog.tracer.window.may_open`), and what was skipped is counted.
"""

from __future__ import annotations

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
from memlog.health import Health
from memlog.tracer.budget import DEFAULT_SHARE, Budget
from memlog.tracer.event import trace_event

if TYPE_CHECKING:
    from memlog.analysis.trace.records import Trace
    from memlog.tracer.window import Window

_WORSE = 1.01
"""By so much a peak must exceed the worst one's for its step to take its place."""


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
        self._window: Window | None = None
        self._left_behind: Window | None = None
        self._thread = 0
        self._opened = self._opening = self._stepped = 0.0
        self._wanted = False
        self._worst = -1
        self._skipped = 0
        self._waiting: Any = None
        self._held: Any = None
        self.want()

    def want(self) -> None:
        """Traces the next step, whatever the budget says."""
        self._wanted = True
        with self._health.contained("waiting for a step to trace"):
            self._wait_for_a_call()

    @property
    def tracing(self) -> bool:
        """Whether the step that is at work is traced."""
        return self._window is not None

    def after_step(self, step: int) -> None:
        """A step is over."""
        now = time.perf_counter()
        if self._budget is None:
            self._budget = Budget(self._share, now)
        if self._left_behind is not None:
            self._leave()
        if self._window is not None:
            self._close(step, now)
        elif self._stepped:
            self._budget.plain_step(now - self._stepped)
        if self._wanted or self._budget.allows_another(now):
            self.want()
        self._stepped = time.perf_counter()

    def finish(self) -> None:
        """The session is over; the events of a step that failed midway are kept all the same."""
        self._stop_waiting()
        if self._window is not None and self._thread == threading.get_ident():
            self._close(None, time.perf_counter())
        if self._held is not None:
            self._held.remove()

    def _wait_for_a_call(self) -> None:
        """Hears of the next module that is called for training, once torch is there."""
        torch = sys.modules.get("torch")
        if torch is None or self._waiting is not None or self._window is not None:
            return
        compiling, grad_enabled = torch.compiler.is_compiling, torch.is_grad_enabled

        def called(module: Any, inputs: Any) -> None:
            if compiling() or not module.training or not grad_enabled() or self._waiting is None:
                return
            with self._health.contained("looking for the model"):
                if self._is_a_model(module):
                    self._stop_waiting()
                    self._open(module, inputs)

        register = torch.nn.modules.module.register_module_forward_pre_hook
        self._waiting = register(called)

    def _is_a_model(self, module: Any) -> bool:
        """What has no parameters, such as a transform of the data, does not tell where training happens."""
        return bool(self._known()) or next(module.parameters(), None) is not None

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

    def _stop_waiting(self) -> None:
        hook, self._waiting = self._waiting, None
        if hook is not None:
            hook.remove()

    def _open(self, module: Any, inputs: Any) -> None:
        begun = time.perf_counter()
        with self._health.contained("beginning to trace a step"):
            # Imported here: they load parts of torch that most of its users never need.
            from memlog.tracer.hooks import hold_optimizer_hooks  # noqa: PLC0415
            from memlog.tracer.window import Window, may_open  # noqa: PLC0415

            if not may_open():
                self._skip()
                return
            if self._held is None:
                self._held = hold_optimizer_hooks()
            first, *others = self._known() or [module]
            window = Window(first, others=others, health=self._health)
            window.start()
            window.module_begins(module, inputs)
            self._window, self._thread, self._wanted = window, threading.get_ident(), False
        self._opened = time.perf_counter()
        self._opening = self._opened - begun

    def _close(self, step: int | None, now: float) -> None:
        window = self._window
        if window is None or self._thread != threading.get_ident():
            return  # another thread's step: the window is its own thread's to close
        self._window = None
        with self._health.contained("tracing a step"):
            trace = window.stop()
            if not window.leave():
                self._left_behind = window
            self._remember(window)
            self._tell(trace, step)
        if self._budget is not None:
            between = self._opening + time.perf_counter() - now
            # From the step before on, as a plain one is counted: what loads the batch is part of both.
            begun = self._stepped + self._opening if self._stepped else self._opened
            self._budget.traced_step(now - begun, between)

    def _leave(self) -> None:
        with self._health.contained("leaving a traced step"):
            if self._left_behind is not None and self._left_behind.leave():
                self._left_behind = None

    def _tell(self, trace: Trace, step: int | None) -> None:
        event = trace_event(trace.result, step, self._skipped)
        peak = trace.result.peak
        if peak is not None and peak > self._worst * _WORSE:
            self._worst = peak
            self._keep(trace, event)
        self._publish(event)

    def _keep(self, trace: Trace, event: TraceEvent) -> None:
        """Leaves the events to the helper process: making a graph of them takes longer than a step."""
        temporary = self._worst_file.with_suffix(".tmp")
        temporary.write_bytes(msgspec.msgpack.encode((event, trace)))
        temporary.replace(self._worst_file)

    def _skip(self) -> None:
        self._skipped += 1
        self._health.say_once(
            "trace_skipped",
            "a step could not be traced where another torch dispatch mode, a compiled graph or a backward "
            "pass was active: it is tried again; how often is in the trace events",
        )

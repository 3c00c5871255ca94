"""Periodic traces of a running session's steps.

A window is the time that one trace covers. A window opens when a training step calls its first module. The
window closes when every optimizer of the step has stepped (`memlog.tracer.schedule.iteration`). The first
step is traced, because a job that does not fit into memory fails there, unless the model has so many modules
that the trace would cover a small part of the step. The third step is traced too if that is cheap, because
the optimizer has its state when that step starts. Later steps are traced as often as the budget allows. A
trace that takes longer than the budget allows is cut: it covers the first part of the step
(`memlog.tracer.schedule.budget`). If a step's peak was well above the peaks of the traced steps, the
next trace comes sooner (`memlog.tracer.schedule.kept_trace`).

A window opens in one hook and closes in another. A window opens only if `memlog.tracer.window.may_open` is
true. The tracer counts the traces that it skips. The tracer abandons a window if the step does not end within
limits (`memlog.tracer.schedule.budget`), for example during an evaluation.
"""

from __future__ import annotations

import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

from memlog._internal.diagnostics import Diagnostics
from memlog.events import CUT, Event
from memlog.tracer.schedule.budget import (
    ATTEMPT_FAILED,
    LIMITS,
    SKIPPED,
    OpenWindow,
    RetryPolicy,
    StepCosts,
    WindowSlot,
    count_skipped,
)
from memlog.tracer.schedule.iteration import (
    CallWaiter,
    FrozenStart,
    OptimizerSchedule,
    RootModules,
    TracedIteration,
    when_to_wait,
)
from memlog.tracer.schedule.kept_trace import (
    FROZEN_START_MISSED,
    KeptTrace,
    LargerSteps,
    StepTrace,
    trace_event,
)

if TYPE_CHECKING:
    from memlog.trace.records import RecordedTrace
    from memlog.tracer.module_hooks import OptimizerSubscription
    from memlog.tracer.module_names import ModuleParents
    from memlog.tracer.window import TraceWindow


class StepScheduler:
    """Scheduler of the traces of one session's steps. Training threads call its methods. No method raises.

    Args:
        kept: File for the events of the most representative step. Of equally representative steps, the one
            with the highest peak is kept. The helper process makes a flame graph of the events.
        publish: Function that gets each trace event.
        diagnostics: Counter of memlog's own errors, and of skipped traces.
        model: Model whose layers are traced. ``None``: the root modules are found when they are called.
        share: Share of training time that tracing may cost, 0 to 1; 0: trace only on request.

    Attributes:
        larger_steps: Subscriber to the event at the end of a step. The subscriber must get a step's event
            before `after_step` is called for that step.
        costs: Cost of the traces so far.
    """

    def __init__(
        self,
        kept: Path,
        publish: Callable[[Event], object],
        diagnostics: Diagnostics,
        model: Any,
        share: float,
    ) -> None:
        self._kept_trace = KeptTrace(kept, publish)
        self._diagnostics = diagnostics
        self._roots = RootModules(model)
        self._schedule = OptimizerSchedule(self._optimizer_begins, self._optimizer_ended)
        self._iteration = TracedIteration(self._schedule)
        self._frozen_start = FrozenStart()
        self._series = set[str]()
        self._retry = RetryPolicy()
        self.costs = StepCosts(share)
        self.larger_steps = LargerSteps()
        self._waiter = CallWaiter(self._called, diagnostics)
        self._subscription: OptimizerSubscription | None = None
        self._last_step: int | None = None
        self._slot = WindowSlot()
        self._unlimited = self._searched = False
        self._wait()

    def want(self) -> None:
        """Trace the next step, the whole of it, even if the budget does not allow it."""
        self._unlimited = True
        self._wait()

    def _wait(self) -> None:
        self._retry.want()
        with self._diagnostics.contained("waiting for a step to trace"):
            self._wait_for_call()

    @property
    def tracing(self) -> bool:
        """True if the current step is traced."""
        return self._slot.window is not None

    @property
    def busy(self) -> bool:
        """True if the current step is traced, or the next one will be."""
        return self.tracing or self._waiter.waiting

    def after_step(self, step: int, *, may_trace: bool = True) -> None:
        """Record the end of a step, and decide whether to trace the next one.

        ``may_trace``: False if the search for growing memory examines the next step. The next step is then
        traced only on request.
        """
        now = time.perf_counter()
        self._last_step = step
        self._schedule.clock_steps += 1
        self.costs.step_ended(now)
        with self._diagnostics.contained("keeping what was traced"):
            self._kept_trace.decide()
        if not self.tracing:
            self.costs.plain_step(now)
        elif self._iteration.is_done or self._iteration.too_rare:
            self._close()
        with self._diagnostics.contained("waiting for a step to trace"):
            if not self.tracing:
                if self._waiter.waiting and not self._may_wait():  # code was compiled since then
                    self._waiter.stop_or_pause()
                self.costs.settle()
                if self._retry.next_step(
                    allowed=may_trace
                    and self.costs.may_trace(
                        now, outdated=lambda: self.larger_steps.seen or self._is_outdated()
                    )
                ):
                    self._frozen_start.reset()
                    self._wait_for_call()
        self.costs.step_begins()

    def allocation_failed(self, _event: Event) -> None:
        """Record that an allocation failed in the current step.

        If the step is completed all the same, the program has repeated it or a part of it, such as with a
        smaller batch. Its trace would show the memory of the failed attempt, so the next step is traced
        instead.
        """
        opened = self._slot.window
        if opened is not None:
            opened.allocation_failed = True

    def finish(self, *, failed: bool = True) -> None:
        """End the session.

        ``failed``: True if an error ended the last step. If false, the trace of an unfinished step is marked
        as covering only a part of an iteration.
        """
        self._slot.end()
        self._waiter.stop()
        if self.tracing:
            self._close(any_thread=True, failed=failed)
        elif self._retry.awaits_compiler:
            count_skipped(
                self._diagnostics, "the run ended before torch.compile was done with the model"
            )
        with self._diagnostics.contained("keeping what was traced"):
            self._kept_trace.finish(outdated=self._is_outdated())
        if self._subscription is not None:
            self._subscription.remove()
        # A program without torch has not loaded this module, and has nothing to remove.
        deferred_removal = sys.modules.get("memlog.tracer.function_patch")
        if deferred_removal is not None:
            deferred_removal.remove_waiting()

    def _optimizer_begins(self, optimizer: Any) -> None:
        self._kept_trace.optimizer_begins(optimizer)
        self._leave_if_cut()

    def _leave_if_cut(self) -> None:
        """Remove the dispatch mode of a window that has stopped recording, so that it costs no more."""
        opened = self._slot.window
        if opened is not None and opened.window.cut:
            opened.window.leave()

    def _optimizer_ended(self, optimizer: Any) -> None:
        """End the trace if all optimizers of the step have stepped.

        memlog counts the steps of one optimizer. Other optimizers may step later than this optimizer.
        """
        self._kept_trace.optimizer_ended(optimizer)
        if self.tracing and self._iteration.steps and self._iteration.is_done:
            self._close()

    def _is_outdated(self) -> bool:
        """Return True if optimizers of the kept trace now train together with other optimizers."""
        return self._schedule.has_joined(self._kept_trace.members)

    # Waiting for the module call at which a window opens.

    def _wait_for_call(self) -> None:
        """If torch is loaded, wait for the next module call that begins a training step."""
        if "torch" not in sys.modules or self._slot.ended:
            return
        _load_tracer()
        if self._may_wait():
            self._slot.if_free(self._waiter.start)

    def _may_wait(self) -> bool:
        when = when_to_wait(self._roots, self.costs.steps)
        if when == "never":
            self._retry.disable()
            why = "torch.compile is in use: its graphs hide layers, and hooks make it compile them again"
            count_skipped(self._diagnostics, why, for_good=True)
        else:
            self._retry.awaits_compiler = when == "later"
        return when == "now"

    def _called(self, module: Any, inputs: Any) -> None:
        opened = self._slot.window
        if opened is not None:
            if opened.thread is threading.current_thread() and opened.exceeds_limits(module):
                self._abandon()
            self._leave_if_cut()
        elif not self._may_wait():
            self._waiter.stop_or_pause()  # before the called module is compiled
        elif self._waiter.waiting and (
            self._roots.may_train(module) or self._frozen_start.is_step_start(module)
        ):
            self._slot.open(lambda: self._open_window(module, inputs), self._waiter.stop)

    # Opening and closing a window.

    def _open_window(self, module: Any, inputs: Any) -> OpenWindow | None:
        began = time.perf_counter()
        try:
            # Imported here: they load parts of torch that most users of sessions never need.
            from memlog.tracer.module_hooks import OptimizerSubscription  # noqa: PLC0415
            from memlog.tracer.window import may_open  # noqa: PLC0415

            if not may_open():
                self._retry.postpone()
                count_skipped(
                    self._diagnostics,
                    "another torch dispatch mode, a transformation of torch.func, a graph that is compiled "
                    "or recorded, or a backward pass was active",
                )
                return None
            if self._subscription is None:
                self._subscription = OptimizerSubscription(self._schedule, self._diagnostics)
            roots = self._found_roots(module, began)
            is_first = self.costs.budget.is_first
            if is_first and not self._unlimited and self._waits(roots, began):
                return None
            opened = OpenWindow(
                module,
                inputs,
                model=self._roots.named(),
                roots=roots,
                optimizers=self._schedule.optimizers(),
                known=self._roots.optimizers(),
                diagnostics=self._diagnostics,
                usual_step=self.costs.budget.median_step,
                most_seconds=None if self._unlimited else self.costs.budget.limit(began),
            )
        except Exception as error:  # noqa: BLE001 - training goes on
            self._diagnostics.fault("beginning to trace a step", error)
            self._retry.done()
            count_skipped(self._diagnostics, "the trace could not begin")
            now = time.perf_counter()
            self.costs.window_failed(now - began, now)
            return None
        self._iteration.begin()
        self._frozen_start.window_opened()
        self._unlimited = False
        self.costs.window_opened(began)
        self._retry.done()
        return opened

    def _found_roots(self, module: Any, now: float) -> list[Any]:
        """Return the root modules: ``module`` is called first.

        Usually a variable of the program refers to the outermost module, or an optimizer shows that a root
        is not a part. Otherwise all live modules are searched, if the budget covers this and the trace. Until
        then the called module counts as outermost.
        """
        roots = self._roots.modules()
        budget = self.costs.budget
        if roots and not budget.search_due:
            self.costs.searched(0.0, 0.0)
            return roots
        from memlog.tracer import module_names  # noqa: PLC0415 - loaded already

        began = time.thread_time()
        called = roots or [module]
        visible = module_names.ModuleParents(most_seconds=0.0)
        found = self._outermost(called, visible)
        unsure = visible.skipped and not self._searched
        unsure = unsure and not self._are_whole(found, visible.optimizers())
        due = module_names.search_seconds() if unsure else 0.0
        if due and (self._unlimited or self.costs.covers(due, *self._size(found), now)):
            self._searched, due = True, 0.0
            found = self._outermost(called, module_names.ModuleParents())
        self.costs.searched(time.thread_time() - began, due)
        return list({id(one): one for one in found}.values())

    def _outermost(self, called: list[Any], parents: ModuleParents) -> list[Any]:
        named, optimizers = self._roots.named(), self._schedule.optimizers()
        return [one if one is named else parents.outermost(one, optimizers) for one in called]

    def _are_whole(self, roots: list[Any], optimizers: list[Any]) -> bool:
        """Return whether the optimizers, and those that have stepped, show that no root is a part."""
        from memlog.tracer.module_names import is_whole  # noqa: PLC0415 - loaded already

        known, named = [*self._schedule.optimizers(), *optimizers], self._roots.named()
        return all(root is named or is_whole(root, known) for root in roots)

    def _size(self, roots: list[Any]) -> tuple[int, str]:
        """Return the number of modules in ``roots``, and the type of their device."""
        from memlog.tracer.module_names import count_modules  # noqa: PLC0415 - loaded already
        from memlog.tracer.window import device_of  # noqa: PLC0415 - loaded already

        return count_modules(roots), device_of(roots, None).type

    def _waits(self, roots: list[Any], now: float) -> bool:
        """Return whether the first trace must wait until the run has earned it. Then remember the roots."""
        if not self.costs.waits(*self._size(roots), now):
            return False
        self._diagnostics.say_once(
            "first_trace_waits", f"no step is traced yet: {self.costs.untraced}"
        )
        self._retry.done()
        self._roots.remember(roots, threading.current_thread(), ())
        return True

    def _close(self, *, any_thread: bool = False, failed: bool | None = None) -> None:
        """End the current trace, if there is one.

        Args:
            any_thread: True to end the trace even if another thread began the trace.
            failed: ``None`` at the end of a step. At the end of the session, True if the step failed, else
                False.
        """
        opened = self._slot.window
        if opened is not None:
            orphaned = not opened.thread.is_alive() and not any_thread
            if opened.window.overflowed or orphaned:
                self._abandon()
                return
            if opened.window.lost:
                self._abandon(
                    "the program turned a memory history of its own on or off in the step"
                )
                return
            if opened.allocation_failed and not failed:
                self._abandon(ATTEMPT_FAILED)
                self._retry.want()
                return
        # Another thread may have closed the window since. `take` gives it to one thread only.
        opened = self._slot.take(any_thread=any_thread)
        if opened is None:
            return
        from memlog.tracer.module_names import search_seconds  # noqa: PLC0415 - loaded already

        self._waiter.stop()
        began = time.thread_time()
        self.larger_steps.step_was_traced()
        with self._diagnostics.contained("tracing a step"):
            try:
                trace = opened.window.stop()
            finally:
                _remove(opened.window)
            self._roots.remember(
                opened.window.roots(), opened.thread, opened.window.known_optimizers()
            )
            self._keep(trace, opened.window, failed=failed)
            if not self._searched and (
                opened.window.search_skipped or self.costs.budget.search_due
            ):
                whole = self._are_whole(self._roots.modules(), self._roots.optimizers())
                self.costs.budget.search_due = 0.0 if whole else search_seconds()
        closing = time.thread_time() - began
        self.costs.window_closed(opened.window.seconds, closing, cut=opened.window.cut)

    def _abandon(self, why: str = f"it did not end within {LIMITS}") -> None:
        opened = self._slot.take(any_thread=True)
        if opened is None:
            return
        self._waiter.stop()
        self._frozen_start.forget()
        with self._diagnostics.contained("abandoning a traced step"):
            try:
                opened.window.abandon()
            finally:
                _remove(opened.window)
        count_skipped(self._diagnostics, why)
        self.costs.window_abandoned(opened.window.seconds)

    def _keep(self, trace: RecordedTrace, window: TraceWindow, *, failed: bool | None) -> None:
        """Publish a trace, and keep it if it is the most representative one.

        ``failed``: ``None`` at the end of a step. At the end of the session, True if the step failed.
        """
        schedule, iteration, step_ended = self._schedule, self._iteration, failed is None
        step = self._last_step if step_ended else None
        step_trace = StepTrace(
            trace,
            trace_event(trace.result, step, self._diagnostics.dropped[SKIPPED], self._series),
            iteration.members(),
            whole=step_ended and iteration.is_done,
            warm=not iteration.state_is_new,
        )
        if window.cut:
            self._kept_trace.add(step_trace.as_partial(CUT), outdated=self._is_outdated())
            return
        if self._frozen_start.missed and not failed:
            step_trace = step_trace.as_partial(FROZEN_START_MISSED)
            self._kept_trace.add(step_trace, outdated=self._is_outdated())
            return
        if step_ended and not schedule.has_interval:
            by_hand = not schedule.optimizers()  # the user marks the steps
            whole = by_hand or iteration.steps_all_of(window.roots())
            self._kept_trace.add_undecided(step_trace, whole=whole)
            return
        if not step_trace.whole and not failed:
            step_trace = step_trace.as_partial()
        self._kept_trace.add(step_trace, outdated=self._is_outdated())


def _remove(window: TraceWindow) -> None:
    from memlog.tracer.function_patch import remove_when_possible  # noqa: PLC0415 - torch is loaded already

    remove_when_possible(window)


def _load_tracer() -> None:
    """Import the tracer before steps are traced, so that no traced step waits for imports.

    In a program without torch it is not imported, because it loads parts of torch.
    """
    import memlog.tracer.function_patch  # noqa: PLC0415
    import memlog.tracer.module_hooks  # noqa: PLC0415
    import memlog.tracer.window  # noqa: F401, PLC0415

"""Search for what holds memory that grows, over some steps of training.

1. The storages that a few whole iterations make are watched, from one optimizer step's end to another's.
2. Several steps later, those that are still alive are named: their owner, and the line that made them.
   Containers that have grown meanwhile are named as well.
3. If that explains less than half of the growth, ``tracemalloc`` runs for some steps.

Between the steps only weak references and numbers are kept.
"""

from __future__ import annotations

import threading
from typing import Final

from memlog._internal.diagnostics import Diagnostics
from memlog.leaks.containers import Census
from memlog.leaks.frame_variables import all_objects
from memlog.leaks.growing_tensors import SizesAtEnds
from memlog.leaks.holder_report import HolderReport
from memlog.leaks.holders import Holder
from memlog.leaks.model_tensors import ModelTensors
from memlog.leaks.python_memory import AllocationTrace
from memlog.leaks.time_budget import TimeBudget
from memlog.leaks.watched_storages import StorageWatch, may_watch

WATCHED: Final = 4
"""Iterations whose storages are watched."""
LATER: Final = 9
"""Steps between the watched iterations and the search for what is left.

The number is odd: a list that is replaced in each step alternates between two addresses. If the number were
even, the new list would have the address of an earlier one, and be taken for a list that no longer grows.
"""
_TRACED: Final = 5
"""Steps in each half of the run of ``tracemalloc``."""
_PART_AT_ONCE: Final = 1 / 3
"""Share of the search's time that one step may take. The search goes on in the next step."""
_MOST_AT_ONCE: Final = 3.0
"""Processor seconds for which one step may be held up in any case."""
_ENOUGH: Final = 0.5
"""Share of the growth that holders have to explain, so that nothing else is looked for."""


class HolderSearch:
    """Search for what holds growing memory. Each search runs once.

    Call `step_ended` on the training thread. An error of the search ends it.

    Args:
        budget_seconds: Time that the search may take on the training thread, besides ``tracemalloc``.
        diagnostics: Counter of memlog's own errors.
        rate: Growth to be explained in bytes per step; ``None``: unknown. Then ``tracemalloc`` does not run.
        watched: Iterations whose storages are watched.
        later: Steps between these and the look at what is left.
        step_seconds: Processor seconds for which one step may be held up; ``None``: a third of
            ``budget_seconds``, at most 3.
    """

    def __init__(
        self,
        *,
        budget_seconds: float,
        diagnostics: Diagnostics,
        rate: float | None = None,
        watched: int = WATCHED,
        later: int = LATER,
        step_seconds: float | None = None,
    ) -> None:
        self._budget = TimeBudget(budget_seconds)
        self._diagnostics = diagnostics
        self._rate = rate
        self._watched, self._later = watched, later
        self._step_seconds = step_seconds or min(budget_seconds * _PART_AT_ONCE, _MOST_AT_ONCE)
        self._begun_at: int | None = None
        self._ended_at = 0
        self._traced_from = 0
        self._watch: StorageWatch | None = None
        self._normal: ModelTensors | None = None
        self._censuses: list[Census] = []
        self._sizes = SizesAtEnds()
        self._trace: AllocationTrace | None = None
        self._holders: tuple[Holder, ...] = ()
        self._finished = self._complete = False
        self._lock = threading.Lock()

    def step_ended(self, step: int) -> bool:
        """Go on with the search after an optimizer step; return True once it is finished.

        Args:
            step: Number of the step.
        """
        # Several threads may train. The lock is never waited for.
        if self._finished or not self._lock.acquire(blocking=False):
            return self._finished
        try:
            with self._budget.running(self._step_seconds):
                self._go_on(step)
        except Exception as error:  # noqa: BLE001 - training goes on
            self._finished = True
            self._diagnostics.fault("looking for what holds memory", error)
        finally:
            self._lock.release()
            if self._finished:
                self.stop()  # again, if another thread called it meanwhile
        return self._finished

    @property
    def begun(self) -> bool:
        """True once the first step was looked at."""
        return self._begun_at is not None

    @property
    def complete(self) -> bool:
        """True if everything was looked at, and the search was not cut short."""
        return self._complete

    def holders(self) -> tuple[Holder, ...]:
        """Return what was found, the largest first; empty before the end, or if nothing was found."""
        return self._holders

    def stop(self) -> None:
        """End the search now. It leaves no hook, mode or reference behind. A second call is harmless."""
        self._finished = True
        watch, self._watch = self._watch, None
        if watch is not None:
            watch.end()
        trace, self._trace = self._trace, None
        if trace is not None:
            trace.stop()
        self._censuses.clear()
        self._normal = None

    def _go_on(self, step: int) -> None:
        if self._trace is not None:
            self._go_on_tracing(step, self._trace)
        elif self._begun_at is None or self._watch is None:
            self._begin(step)
        elif not self._ended_at:
            self._go_on_watching(step, self._watch)
        elif step - self._ended_at >= self._later:
            self._look(step, self._watch)

    def _begin(self, step: int) -> None:
        self._begun_at = step
        objects = all_objects()
        self._normal = ModelTensors(objects, self._budget)
        self._censuses = [Census(objects, self._budget)]
        del objects
        if self._budget.spent:
            self.stop()
            return
        most = min(self._budget.left_in_all / 2, self._step_seconds)
        self._watch = StorageWatch(self._diagnostics, self._normal.existing, most)
        if may_watch():  # otherwise only containers are compared
            self._watch.begin()

    def _go_on_watching(self, step: int, watch: StorageWatch) -> None:
        self._sizes.add(watch.alive().values(), watch.iteration)
        watch.iteration_ended()
        if watch.iteration >= self._watched or watch.ended:
            watch.end()
            self._budget.take(watch.seconds)
            self._ended_at = step
            self._censuses.append(Census(all_objects(), self._budget))

    def _look(self, step: int, watch: StorageWatch) -> None:
        steps = step - (self._begun_at or 0)
        if self._normal is not None:
            report = HolderReport(watch, self._censuses, self._normal, steps, self._budget)
            found = (*report.holders(), *self._sizes.holders())
            self._holders = tuple(sorted(found, key=lambda one: -one.bytes_per_step))
        self._watch = self._normal = None
        self._censuses = []
        explained = sum(holder.bytes_per_step for holder in self._holders)
        if self._rate is None or explained >= _ENOUGH * self._rate:
            self._complete = not self._budget.spent
            self.stop()
            return
        self._trace = AllocationTrace()
        self._traced_from = step
        if not self._trace.start():
            self.stop()

    def _go_on_tracing(self, step: int, trace: AllocationTrace) -> None:
        if not trace.running:
            self.stop()
        elif step - self._traced_from == _TRACED:
            trace.mark_middle()
        elif step - self._traced_from >= 2 * _TRACED:
            found = trace.finish(_TRACED)
            least = _ENOUGH * (self._rate or 0.0) / 2
            self._holders += tuple(one for one in found if one.bytes_per_step >= least)
            self._complete = not self._budget.spent
            self.stop()

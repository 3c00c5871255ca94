"""Search for the holders of growing memory, such as variables and containers, over some steps of training.

1. Watch the storages that a few whole iterations make. An iteration lasts from the end of one optimizer step
   to the end of the next.
2. Several steps later, find the owner of each storage that is still alive, and the line that made this
   storage. Also find the containers that have grown meanwhile.
3. If these holders explain less than half of the growth, run ``tracemalloc`` for some steps.

From step to step, the search keeps only weak references and numbers.
"""

from __future__ import annotations

import threading
import time
from itertools import pairwise
from statistics import median
from typing import Final

from memlog._internal.diagnostics import Diagnostics
from memlog.leaks.containers import Census
from memlog.leaks.frame_variables import all_objects
from memlog.leaks.growing_tensors import SizesAtEnds
from memlog.leaks.holder_report import HolderReport
from memlog.leaks.holders import Holder
from memlog.leaks.known_models import KnownModels
from memlog.leaks.python_memory import AllocationTrace
from memlog.leaks.time_budget import TimeBudget
from memlog.leaks.watched_storages import StorageWatch, may_watch

WATCHED: Final = 4
"""Number of iterations whose storages are watched."""
LATER: Final = 9
"""Number of steps between the watched iterations and the search for storages that are still alive.

The number is odd. A list that is replaced in each step alternates between two addresses. After an even number
of steps, memlog would confuse the new list with an earlier list and overlook the growth.
"""
_TRACED: Final = 5
"""Number of steps in each half of the trace with ``tracemalloc``."""
_PART_AT_ONCE: Final = 1 / 3
"""When the search has taken this fraction of ``budget_seconds`` in one step, it stops its work in this
step."""
_MOST_AT_ONCE: Final = 3.0
"""When the search has taken this number of processor seconds in one step, it stops its work in this step."""
_TRACING_SECONDS: Final = 0.3
"""Processor seconds by which ``tracemalloc`` may make all steps together longer."""
_ENOUGH: Final = 0.5
"""If the holders explain less than this fraction of the growth, ``tracemalloc`` runs."""


class HolderSearch:
    """Search for the holders of growing memory. Each object runs a single search.

    Call `step_ended` on the training thread. If the search fails, it ends, and training goes on.

    ``budget_seconds`` is the processor time that the search may take on the training thread, without the
    time by which ``tracemalloc`` slows the program down (`_TRACING_SECONDS`). ``rate`` is the growth to
    explain, in bytes per step. If ``rate`` is 0, ``tracemalloc`` does not run. `WATCHED` and `LATER` describe
    ``watched`` and ``later``.

    Attributes:
        holders: The holders found so far, the fastest growth first. Those from ``tracemalloc`` come last.
        complete: True if the search looked at everything before its time was spent.
    """

    def __init__(
        self,
        *,
        budget_seconds: float,
        diagnostics: Diagnostics,
        rate: float,
        watched: int = WATCHED,
        later: int = LATER,
    ) -> None:
        self._budget_seconds = budget_seconds
        self._budget = TimeBudget(budget_seconds)
        self._diagnostics = diagnostics
        self._rate = rate
        self._watched, self._later = watched, later
        self._step_seconds = min(budget_seconds * _PART_AT_ONCE, _MOST_AT_ONCE)
        self._begun_at: int | None = None
        self._ended_at = 0
        self._traced_from = 0
        self._watch: StorageWatch | None = None
        self._normal: KnownModels | None = None
        self._censuses: list[Census] = []
        self._sizes = SizesAtEnds()
        self._trace: AllocationTrace | None = None
        self._waited: list[float] = []
        """Processor time of the process at the ends of steps in which the search only waits."""
        self.holders: tuple[Holder, ...] = ()
        self.complete = False
        self._finished = False
        self._lock = threading.Lock()

    def step_ended(self, step: int) -> bool:
        """Continue the search after an optimizer step. Return True if the search is finished."""
        # Several threads can train. A thread that does not get the lock at once returns.
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
                self.stop()  # again: another thread can have called `stop` during this step's search
        return self._finished

    @property
    def begun(self) -> bool:
        """True from the first call of `step_ended` on."""
        return self._begun_at is not None

    @property
    def seconds(self) -> float:
        """Processor time that the search has taken so far."""
        return self._budget_seconds - self._budget.left_in_all

    def stop(self) -> None:
        """End the search, and remove its hooks, modes and references. A second call is harmless."""
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
        # Each of the first parts looks at all objects once, so that none makes a step much longer.
        if self._trace is not None:
            self._go_on_tracing(step, self._trace)
        elif self._begun_at is None:
            self._begun_at = step
            self._censuses = [Census(all_objects(), self._budget)]
        elif self._watch is None:
            self._begin_watching()
        elif not self._ended_at:
            self._go_on_watching(step, self._watch)
        elif step - self._ended_at >= self._later:
            self._look(step, self._watch)
        else:
            self._waited.append(time.process_time())

    def _begin_watching(self) -> None:
        self._normal = KnownModels(all_objects(), self._budget)
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
            self.holders = tuple(sorted(found, key=lambda one: -one.bytes_per_step))
        self._watch = self._normal = None
        self._censuses = []
        explained = sum(holder.bytes_per_step for holder in self.holders)
        if explained >= _ENOUGH * self._rate:
            self.complete = not self._budget.spent
            self.stop()
            return
        usual = [after - before for before, after in pairwise(self._waited)]
        self._trace = AllocationTrace(median(usual) if usual else 0.0, _TRACING_SECONDS)
        self._traced_from = step
        if not self._trace.start():
            self.stop()

    def _go_on_tracing(self, step: int, trace: AllocationTrace) -> None:
        slower_by = max(trace.slower_by, 0.0)
        if not trace.running:
            self._budget.take(slower_by)
            self.stop()
        elif step - self._traced_from == _TRACED:
            trace.mark_middle()
        elif step - self._traced_from >= 2 * _TRACED:
            found = trace.finish(_TRACED)
            least = _ENOUGH * self._rate / 2
            self.holders += tuple(one for one in found if one.bytes_per_step >= least)
            self.complete = not self._budget.spent
            self._budget.take(slower_by)
            self.stop()
        trace.step_ended()

"""Inquiry into growth: from the first suspicion to findings that name the holders of the memory."""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import TYPE_CHECKING, NamedTuple

from memlog._internal.diagnostics import Diagnostics
from memlog._internal.units import format_bytes
from memlog.events import ALLOCATED, HOST_ANON, Event, Finding, Inquiry, now_us
from memlog.facts.detector import FREE_LISTS
from memlog.facts.growth_findings import GrowthFindings, confidence_in, finding_of
from memlog.growth.suspicion import Suspicion
from memlog.leaks.holders import Holder
from memlog.leaks.time_budget import TimeBudget, seconds_allowed
from memlog.probes.malloc import Heap, read_heap

if TYPE_CHECKING:
    from memlog.leaks.holder_search import HolderSearch

_LEAST_SECONDS = 4.0
"""Processor seconds that a search may take even in a short run. A search looks at all objects three times.
Each look takes 0.4 to 1 s for half a million objects."""
_COUNT_SECONDS = 0.3
"""Maximum processor seconds for adding up the sizes of all tensors. If it takes longer, the sum is
unknown."""
_MOST_SEARCHES = 4
"""Maximum number of searches for holders in a run."""
_PART = 0.25
"""If a holder explains less than this fraction of the growth, it is not reported."""
_EXPLAINED = 0.5
"""If all holders together explain less than this fraction of the growth, a second search begins. A cause from
`by_elimination` is reported only if it explains at least this fraction."""
_SOON = 4
"""If no tensor that a step made stays alive, growth of a device's memory is reported only if memory will be
full within this number of times the steps that the growth has lasted."""
_WATCHED, _LATER = 12, 13
"""Arguments ``watched`` and ``later`` of a second `HolderSearch`. It watches more iterations than the first
search, so that it also finds memory that is kept only every few steps."""


class _Figures(NamedTuple):
    """Memory of this process at one moment."""

    step: int
    heap: Heap | None
    tensors: int | None
    """Bytes of all tensors that have a Python object."""


class GrowthInquiry:
    """Receiver of suspected, confirmed and withdrawn growth of this process and its devices.

    The search for holders begins when growth is suspected, so that it usually ends before the growth is
    confirmed. The holders found are published as findings only after the growth is confirmed. Until then, an
    `Inquiry` event has them as suspects, in case the run ends before that.

    ``is_traced`` returns whether the tracer traces the current step. No search begins in a traced step.
    ``begun`` is the start of the run in seconds, as `time.monotonic` returns it.
    """

    def __init__(
        self,
        publish: Callable[[Event], object],
        diagnostics: Diagnostics,
        is_traced: Callable[[], bool],
        begun: float,
    ) -> None:
        self._publish = publish
        self._publish_without_cause = GrowthFindings(publish)
        self._diagnostics = diagnostics
        self._is_traced = is_traced
        self._begun = begun
        self._searches = 0
        self._growth: Suspicion | None = None
        self._confirmed: Suspicion | None = None
        self._search: HolderSearch | None = None
        self._holders: tuple[Holder, ...] = ()
        self._earlier: tuple[Holder, ...] = ()
        """Holders of growth that was published. If a tensor on a device is kept, the process's memory can
        seem to grow before the device's does. The holder is the same."""
        self._complete = False
        self._before: _Figures | None = None
        self._is_ending = self._is_early = False
        self._told: tuple[str, bool, bool] | None = None

    @property
    def searching(self) -> bool:
        return self._search is not None

    def ends(self) -> None:
        """Remember that the training has ended. Memory that its functions held can have been freed.

        `finish` takes this back, because another training may follow in the same program.
        """
        self._is_ending = True

    def suspected(self, growth: Suspicion, *, is_early: bool = False) -> None:
        """Begin the search for the cause, unless another growth is being examined.

        ``is_early`` is true if the growth test has too few levels yet. Such a growth gives way to one that
        the test suspects. If both are of one series, the search goes on, and what it has found stays.
        """
        if not _has_holders(growth) or not (self._growth is None or self._is_early):
            return
        before, self._growth, self._is_early = self._growth, growth, is_early
        if before is None or before.series != growth.series:
            self._end_search()
            self._holders, self._complete = (), False
            self._before = _figures(growth.step)
            self._begin_search(growth)
        elif self._search is None and not self._is_explained(growth):
            self._begin_search(growth)

    def withdrawn(self, growth: Suspicion) -> None:
        """End the search, because the growth has ended."""
        if self._growth is not None and self._growth.series == growth.series:
            self._end_search()
            self._growth, self._holders = None, ()
            self._tell(growth.series, growth.step)

    def confirmed(self, growth: Suspicion) -> None:
        """Publish the growth with its cause. If the search still runs, publish when the search has ended."""
        if not _has_holders(growth):
            self._publish_without_cause(growth)
            return
        self._confirmed = growth
        if self._search is None and self._searches and not self._is_explained(growth):
            self._begin_search(growth, watched=_WATCHED, later=_LATER)
        if self._search is None:
            self._report(growth)

    def after_step(self, step: int) -> None:
        """Continue the search after an optimizer step. Never raises."""
        search = self._search
        if search is None or (not search.begun and self._is_traced()):
            return
        if self._before is not None and self._before.step == step:
            return  # adding up the sizes of all tensors has held up this step already
        if search.step_ended(step):
            with self._diagnostics.contained("publishing what holds memory"):
                self._end_search()
                if self._confirmed is not None:
                    self._report(self._confirmed)
                elif self._growth is not None:
                    self._tell(self._growth.series, step, self._suspects(self._growth))

    def finish(self) -> None:
        """End the search. Publish the growth if it is confirmed."""
        self._end_search()
        if self._confirmed is not None:
            self._report(self._confirmed)
        self._is_ending = False

    def _begin_search(self, growth: Suspicion, **lengths: int) -> None:
        """Begin a search. Pass ``lengths`` (``watched`` and ``later``, or nothing) to `HolderSearch`."""
        if "torch" not in sys.modules or self._searches >= _MOST_SEARCHES:
            return
        from memlog.leaks.holder_search import HolderSearch  # noqa: PLC0415 - it loads parts of torch

        self._searches += 1
        self._search = HolderSearch(
            budget_seconds=seconds_allowed(_LEAST_SECONDS, self._begun),
            diagnostics=self._diagnostics,
            rate=growth.rate,
            **lengths,
        )
        self._tell(growth.series, growth.step, searching=True)

    def _end_search(self) -> None:
        search, self._search = self._search, None
        if search is not None:
            search.stop()
            self._holders = search.holders or self._holders
            self._complete = self._complete or search.complete

    def _tell(
        self,
        series: str,
        step: int,
        suspects: tuple[Finding, ...] = (),
        *,
        searching: bool = False,
    ) -> None:
        """Publish the inquiry's state, if it has changed."""
        state = (series, searching, bool(suspects))
        if state != self._told and (self._told is not None or searching):
            self._told = state
            self._publish(Inquiry(now_us(), step, series, searching, suspects))

    def _suspects(self, growth: Suspicion) -> tuple[Finding, ...]:
        named = self._named(growth)
        return tuple(_finding(growth, one, is_main=one is named[0]) for one in named)

    def _named(self, growth: Suspicion) -> list[Holder]:
        """Return the holders that explain a large enough part of the growth."""
        holders = self._holders or self._earlier
        return [one for one in holders if one.bytes_per_step >= _PART * growth.rate]

    def _is_explained(self, growth: Suspicion) -> bool:
        holders = self._holders or self._earlier
        return sum(one.bytes_per_step for one in holders) >= _EXPLAINED * growth.rate

    def _report(self, growth: Suspicion) -> None:
        holders, before, complete = self._holders, self._before, self._complete
        named = self._named(growth)
        self._confirmed = self._growth = self._before = None
        self._holders, self._complete = (), False
        self._earlier = holders or self._earlier
        if not named and complete and before is not None:
            explained = sum(one.bytes_per_step for one in holders)
            left = _by_elimination(growth, before, explained, is_ending=self._is_ending)
            named = [] if left is None else [left]
        if not named and not (complete and _is_of_larger_steps(growth)):
            self._publish_without_cause(growth)
        for holder in named:
            self._publish(_finding(growth, holder, is_main=holder is named[0]))
        self._tell(growth.series, growth.step)


def _has_holders(growth: Suspicion) -> bool:
    """Return True if objects of this process can hold the memory that grows."""
    return growth.series in (HOST_ANON, FREE_LISTS) or growth.series.endswith(ALLOCATED)


def _is_of_larger_steps(growth: Suspicion) -> bool:
    """Return True if a device's growth is no leak, given that no tensor of the watched steps stayed alive.

    What is in use after a step contains the step's inputs. So it rises while inputs become larger, or while
    more and more layers are trained. Such growth usually ends. If memory will be full before that, it counts.
    """
    if not growth.series.endswith(ALLOCATED):
        return False
    lasted = growth.step - growth.since_step
    return growth.forecast is None or growth.forecast[0] > growth.step + _SOON * lasted


def _figures(step: int) -> _Figures:
    tensors: int | None = 0
    if "torch" in sys.modules:
        from memlog.leaks.frame_variables import all_objects  # noqa: PLC0415 - they load parts of torch
        from memlog.leaks.live_tensors import tensor_bytes  # noqa: PLC0415

        budget = TimeBudget(_COUNT_SECONDS)
        with budget.running():
            tensors = tensor_bytes(all_objects(), budget)
    return _Figures(step, read_heap(), tensors)


def _by_elimination(
    growth: Suspicion, before: _Figures, explained: float, *, is_ending: bool
) -> Holder | None:
    """Return a cause outside Python objects if the allocator's figures show a cause; otherwise ``None``.

    Return ``None`` also if tensors hold the memory. If ``is_ending`` is true, the allocator's free memory is
    not considered, because the program can have freed this memory after the last step.
    """
    now = _figures(growth.step)
    steps = now.step - before.step
    if growth.series.endswith(ALLOCATED) or steps <= 0 or before.heap is None or now.heap is None:
        return None
    if before.tensors is None or now.tensors is None:
        return None
    if (now.tensors - before.tensors) / steps >= _PART * growth.rate:
        return None
    from memlog.tracer.torch_private import profiling  # noqa: PLC0415 - it needs torch, which is loaded

    return by_elimination(
        growth.rate,
        explained=explained,
        malloc_used=(now.heap.in_use - before.heap.in_use) / steps,
        malloc_free=0.0 if is_ending else (now.heap.idle - before.heap.idle) / steps,
        profiling=profiling(),
    )


def by_elimination(
    rate: float,
    *,
    explained: float,
    malloc_used: float,
    malloc_free: float,
    profiling: bool,
) -> Holder | None:
    """Return the cause that the figures of the C library's allocator show; ``None`` if they show none.

    Args:
        rate: Growth in bytes per step.
        explained: Bytes per step that Python objects explain.
        malloc_used: Growth per step of the bytes that the C library's allocator has given out.
        malloc_free: Growth per step of the free bytes that the C library's allocator keeps.
        profiling: True if torch's profiler records. The profiler keeps its events in C++ until it is stopped.
    """
    least = _EXPLAINED * rate
    if explained >= least:
        return None
    if malloc_free >= least:
        return _free_lists(malloc_free)
    if malloc_used - explained >= least:
        return _native(malloc_used - explained, explained, profiling=profiling)
    return None


def _free_lists(rate: float) -> Holder:
    return Holder(
        "allocator_free_lists",
        f"The C library's allocator keeps {format_bytes(rate)} more of free memory per step.",
        None,
        rate,
        ("what the program uses does not grow; what the allocator keeps free does",),
        "medium",
        "Set `MALLOC_ARENA_MAX=2` or `MALLOC_TRIM_THRESHOLD_=131072`, or use jemalloc.",
    )


def _native(rate: float, explained: float, *, profiling: bool) -> Holder:
    title = f"A C or C++ library allocates {format_bytes(rate)} per step and does not free it."
    remedy = "Run some steps with `heaptrack python …` or `memray run --native` to see the caller."
    if profiling:
        title = f"torch's profiler is on: it keeps {format_bytes(rate)} of events per step."
        remedy = "Stop the profiler, or give it a `schedule` that ends (`torch.profiler.schedule`)."
    return Holder(
        "native_library",
        title,
        None,
        rate,
        (
            f"memory from malloc grows by {format_bytes(rate + explained)} per step",
            f"Python objects and tensors explain {format_bytes(explained)} of it",
        ),
        "medium",
        remedy,
    )


def _finding(growth: Suspicion, holder: Holder, *, is_main: bool) -> Finding:
    """Return the finding about one holder.

    If ``is_main`` is true, the finding reports the rate and the forecast of the whole growth. Otherwise, it
    reports the rate of the holder, and no forecast.
    """
    general = finding_of(growth)
    memory = "the process's memory" if general.where is None else f"memory on {general.where}"
    return Finding(
        time_us=general.time_us,
        step=growth.step,
        kind=holder.kind,
        title=holder.title,
        where=holder.where,
        since_step=growth.since_step,
        rate=growth.rate if is_main else holder.bytes_per_step,
        forecast=growth.forecast if is_main else None,
        limit=growth.limit,
        evidence=(
            *holder.evidence,
            f"It explains {format_bytes(holder.bytes_per_step)} per step; {memory} grows by "
            f"{format_bytes(growth.rate)} per step.",
            general.evidence[-1],
        ),
        confidence=min(
            (holder.confidence, confidence_in(growth)), key=("low", "medium", "high").index
        ),
        remedy=holder.remedy,
        memory=general.memory,
    )

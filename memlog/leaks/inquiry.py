"""Inquiry into growth: from the first suspicion to findings that name the holders of the memory."""

from __future__ import annotations

import gc
import os
import sys
import time
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

from memlog._internal.diagnostics import Diagnostics
from memlog._internal.terminal import format_bytes
from memlog.events import (
    ALLOCATED,
    HOST_ANON,
    SHARED,
    Batch,
    Event,
    Finding,
    Inquiry,
    Trace,
    now_us,
)
from memlog.facts.growth_findings import FREE_LISTS, GrowthFindings, confidence_in, finding_of
from memlog.growth.series import Suspicion
from memlog.leaks.holders import Holder, per_step
from memlog.leaks.other_causes import (
    Figures,
    between_free_memory,
    cause_by_elimination,
    cause_in_traces,
    figures,
)
from memlog.leaks.periodic_search import LASTING, PeriodicInquiry
from memlog.leaks.process_objects import EarnedTime, seconds_allowed
from memlog.probes.machine import device_free, host_free

if TYPE_CHECKING:
    from memlog.leaks.holder_search import HolderSearch

_LEAST_SECONDS = 4.0
"""Processor seconds that a search may take even in a short run. A search looks at all objects three times.
Each look takes 0.4 to 1 s for half a million objects."""
_MOST_SEARCHES = 4
"""Maximum number of searches for holders in a run."""
_PART = 0.25
"""If a holder explains less than this fraction of the growth, it is not reported."""
_SUSPECT = 0.15
"""As `_PART`, for a possible cause of growth that the growth test does not suspect: containers that grow
whenever memory rises."""
_KEPT = ("kept_tensors", "growing_container")
_HELD = (*_KEPT, "kept_graph", "model_copies")
"""Kinds of holders that a variable of the program refers to. `_KEPT` have no more than the program keeps."""
_CYCLES = "reference_cycles"
_SLOWEST = 0.5
"""A holder that grows more slowly than this part of its earlier rate may be full."""
_OFTEN = 0.25
"""Elements per step. A holder that gained fewer in the search's steps must have gained one since."""
_PAUSE = 32
"""Least number of steps after which this is known."""
_ALIKE = 0.7
"""Least ratio of two rates that are those of the same objects."""
_EXPLAINED = 0.5
"""If all holders together explain less than this fraction of the growth, a second search begins."""
_RISES = 0.35
"""As `_EXPLAINED`, for containers that grow whenever memory rises. That they do is evidence, too."""
_CERTAIN = 2
"""Number of rises at which a container must grow, before it is reported as the cause of confirmed growth."""
_KNOWN = 3
"""Number of rises at which a container must grow, before no other search is needed. Python must see its
bytes."""
_FITS = 0.8
"""A container with a limit that can still gain at most this part of what is free is not reported."""
_EARLY_RISES, _EARLY_STEPS, _EARLY_PART = 6, 64, 0.04
"""Growth that the growth test has not confirmed is reported with its holder after this many rises and steps,
when it has taken this part of what was free. A cache that fills may end sooner."""
_SOON = 4
"""If no tensor that a step made stays alive, growth of a device's memory is reported only if memory will be
full within this number of times the steps that the growth has lasted."""
_WATCHED, _LATER = 12, 13
"""Arguments ``watched`` and ``later`` of a second `HolderSearch`. It watches more iterations than the first
search, so that it also finds memory that is kept only every few steps."""


class GrowthInquiry:
    """Receiver of suspected, confirmed and withdrawn growth of this process and its devices.

    The search for holders begins when growth is suspected, so that it usually ends before the growth is
    confirmed. The holders found are published as findings only after the growth is confirmed. Until then, an
    `Inquiry` event has them as suspects, in case the run ends before that.

    ``is_traced`` returns whether the tracer traces the current step. No search begins in a traced step.
    ``begun`` is the start of the run in seconds, as `time.monotonic` returns it. ``traces`` are traced
    steps with exact figures.
    """

    def __init__(
        self,
        publish: Callable[[Event], object],
        diagnostics: Diagnostics,
        is_traced: Callable[[], bool],
        begun: float,
        traces: Sequence[Trace] = (),
    ) -> None:
        self._publish = publish
        self._traces = traces
        self._publish_without_cause = GrowthFindings(publish)
        self._diagnostics = diagnostics
        self._is_traced = is_traced
        self._begun = begun
        self._searches = 0
        self._time = EarnedTime()
        self._growth: Suspicion | None = None
        self._confirmed: Suspicion | None = None
        self._search: HolderSearch | None = None
        self._holders: tuple[Holder, ...] = ()
        self._earlier: tuple[Holder, ...] = ()
        """Holders of growth that was published. If a tensor on a device is kept, the process's memory can
        seem to grow before the device's does. The holder is the same."""
        self._step = self._found_at = 0
        """Newest step, and the step at which `_holders` were found."""
        self._complete = False
        self._before: Figures | None = None
        self._is_ending = self._is_early = False
        self._is_delayed = False
        """True while a search for holders waits for the one that needs some rises."""
        self._told: tuple[str, bool, bool, tuple[str, ...]] | None = None
        self._periodic = PeriodicInquiry(diagnostics, self._take_periodic)
        self._limited: tuple[str, int, tuple[Holder, ...]] | None = None
        """Series, newest step at which it grew, and holders with a limit. They may be full since."""
        self._unexplained: Suspicion | None = None
        """Growth that was published without a cause, while a search for the cause may go on."""

    @property
    def searching(self) -> bool:
        return self._search is not None

    @property
    def waits(self) -> bool:
        """True while searches that hold up steps wait for the one for what grows at rises."""
        return self._is_delayed or self._periodic.is_promising

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
            self._holders, self._complete, self._before = (), False, None
            self._periodic.begin(_owner(growth.series), growth.since_step, rate=growth.rate)
            self._begin_first_search(growth)
        elif self._search is None and not self._is_explained(growth):
            self._begin_first_search(growth)

    def withdrawn(self, growth: Suspicion) -> None:
        """End the search, because the growth has ended."""
        if self._growth is not None and self._growth.series == growth.series:
            self._end_search()
            self._growth, self._holders = None, ()
            self._is_delayed = False
            self._tell(growth.series, growth.step)

    def rises(self, series: str, since: int, rise: float) -> None:
        """Begin a search for what grows whenever a series rises, unless the growth is explained.

        ``since`` is the step of the first rise, and ``rise`` its bytes.
        """
        growth = self._growth
        if growth is None or growth.series != series or not self._is_explained(growth):
            self._periodic.begin(series, since, rise)

    def confirmed(self, growth: Suspicion) -> None:
        """Publish the growth with its cause. If the search still runs, publish when the search has ended."""
        if not _has_holders(growth):
            self._publish_without_cause(growth)
            return
        self._confirmed = growth
        self._drop_full_holders(growth)
        has_tried = self._searches or self._is_delayed
        if self._search is None and has_tried and not self._is_explained(growth):
            self._begin_search(growth, watched=_WATCHED, later=_LATER)
        self._is_delayed = False
        if self._search is None:
            self._report(growth)

    def _drop_full_holders(self, growth: Suspicion) -> None:
        """Forget holders that have hardly grown since they were found, such as a cache that is full."""
        steps = growth.step - self._found_at
        known = {}
        for number, length, rate in (
            holder.container for holder in self._holders if holder.container
        ):
            # The rate of a container that gained a few elements in the search's steps is rough.
            gained = _SLOWEST * rate * steps if rate >= _OFTEN else 1
            known[number] = length + gained
        # After the end, containers can be gone.
        if known and steps >= _PAUSE and not self._is_ending:
            from memlog.leaks.containers import standing_still  # noqa: PLC0415 - it loads torch

            still = standing_still(known)
            self._holders = tuple(
                holder
                for holder in self._holders
                if holder.container is None or holder.container[0] not in still
            )

    def after_step(self, step: int, event: Batch | None = None) -> None:
        """Continue the search after an optimizer step. Never raises."""
        search, self._step = self._search, step
        self._periodic.after_step(step, event, paused=search is not None)
        if self._is_delayed and self._growth is not None and not self._periodic.is_promising:
            self._begin_first_search(self._growth)
        if search is None or (not search.begun and self._is_traced()):
            return
        if self._before is not None and self._before.step == step:
            return  # adding up the sizes of all tensors has held up this step already
        if search.step_ended(step):
            with self._diagnostics.contained("publishing what holds memory"):
                self._end_search()
                growth = self._confirmed or self._growth
                if growth is not None and _explain(self._holders, growth):
                    self._periodic.stop()
                elif growth is not None and not self._is_explained(growth):
                    self._periodic.begin(_owner(growth.series), growth.since_step)
                if self._confirmed is not None:
                    self._report(self._confirmed)
                elif self._growth is not None:
                    self._tell_suspects(self._growth, step, self._named(self._growth))

    def finish(self) -> None:
        """End the search. Publish the growth if it is confirmed."""
        self._end_search()
        if self._confirmed is not None:
            self._report(self._confirmed)
        elif self._unexplained is not None and _explain(
            self._periodic.holders, self._unexplained, _RISES
        ):
            self._report_rises(self._unexplained, self._unexplained.step)
        elif self._periodic.still_rises:
            growth = self._growth_of_rises(self._periodic.last_step)
            self._report_rises(growth, growth.step)
        self._is_ending = False

    def _begin_first_search(self, growth: Suspicion) -> None:
        """Begin a search, unless the one for what grows at rises has named a holder, or soon may.

        That one takes much less time, and no step becomes noticeably longer by it.
        """
        is_about = self._periodic.series == _owner(growth.series)
        self._is_delayed = is_about and self._periodic.is_promising
        if not self._is_delayed and not self.is_explained_by_rises(growth):
            self._begin_search(growth)

    def _begin_search(self, growth: Suspicion, **lengths: int) -> None:
        """Begin a search. Pass ``lengths`` (``watched`` and ``later``, or nothing) to `HolderSearch`."""
        if "torch" not in sys.modules or self._searches >= _MOST_SEARCHES:
            return
        if not self._time.is_enough:
            return
        # The figures from before the first search stay. So the second search has a longer time to compare.
        if self._before is None:
            began = time.thread_time()
            self._before = figures(growth.step)
            self._time.take(time.thread_time() - began)
        from memlog.leaks.holder_search import HolderSearch  # noqa: PLC0415 - it loads parts of torch

        self._searches += 1
        self._search = HolderSearch(
            budget_seconds=seconds_allowed(_LEAST_SECONDS, self._begun),
            diagnostics=self._diagnostics,
            # Python allocates neither memory of a device nor shared memory: `tracemalloc` tells nothing.
            rate=growth.rate if growth.series in (HOST_ANON, FREE_LISTS) else 0.0,
            **lengths,
        )
        self._tell(growth.series, growth.step, searching=True)

    def _end_search(self) -> None:
        search, self._search = self._search, None
        if search is not None:
            search.stop()
            self._time.take(search.seconds)
            if search.holders:
                self._holders, self._found_at = search.holders, self._step
            self._complete = self._complete or search.complete

    def _tell(
        self,
        series: str,
        step: int,
        suspects: tuple[Finding, ...] = (),
        *,
        searching: bool = False,
        will_fit: bool = False,
    ) -> None:
        """Publish the inquiry's state, if it has changed."""
        state = (series, searching, will_fit, tuple(suspect.title for suspect in suspects))
        is_news = self._told is not None or searching or self._periodic.series == _owner(series)
        if state != self._told and is_news:
            self._told = state
            self._publish(Inquiry(now_us(), step, series, searching, suspects, will_fit=will_fit))

    def _tell_suspects(self, growth: Suspicion, step: int, holders: Sequence[Holder]) -> None:
        suspects = tuple(
            _finding(growth, holder, is_main=holder is holders[0]) for holder in holders
        )
        self._tell(growth.series, step, suspects, will_fit=_will_fit(growth, holders))

    def _named(self, growth: Suspicion) -> list[Holder]:
        """Return the holders that explain a large enough part of the growth."""
        holders = _large_enough(self._known(growth), growth)
        held = [holder for holder in holders if holder.kind in _HELD]
        return [
            holder
            for holder in holders
            if holder.kind != "python_memory" or not _are_told(holder, held)
        ]

    def _is_explained(self, growth: Suspicion) -> bool:
        known = self._known(growth)
        return _explain(known, growth, _RISES if known is self._periodic.holders else _EXPLAINED)

    def _known(self, growth: Suspicion) -> tuple[Holder, ...]:
        """Return the holders that were found, by the search that explains the growth."""
        holders = self._holders or self._earlier
        rises = self._periodic.holders if self._periodic.series == _owner(growth.series) else ()
        is_sure = bool(holders) and holders[0].confidence == "high" and _explain(holders, growth)
        is_limited = all(holder.bytes_left is not None for holder in rises)
        if is_sure and not is_limited:
            return holders
        if self._periodic.rises >= _CERTAIN and _explain(rises, growth, _RISES):
            return rises
        in_part = () if _explain(holders, growth) else self._in_part(growth)
        return holders if per_step(holders) > per_step(in_part) else in_part

    def _best(self, growth: Suspicion) -> tuple[Holder, ...]:
        """Return the containers that held most of the growth at any rise. They were not sure enough."""
        return self._periodic.best if self._periodic.series == _owner(growth.series) else ()

    def is_explained_by_rises(self, growth: Suspicion) -> bool:
        """Return True if what grows at rises explains the growth. No other search is needed then."""
        periodic = self._periodic
        if periodic.series != _owner(growth.series) or not periodic.holders:
            return False
        if periodic.is_sparse:
            return _explain(periodic.holders, growth, _RISES)
        is_known = periodic.is_weighed and periodic.rises >= _KNOWN
        return (is_known or self._is_sure) and _explain(periodic.holders, growth)

    def _filled_meanwhile(self, growth: Suspicion) -> list[Holder]:
        """Return containers with a limit if they gained most of what grew. They may be full now.

        When a window of outputs is full, the memory between them can grow for some more steps.
        """
        series, step, holders = self._limited or ("", 0, ())
        gained = per_step(holders) * (step - growth.since_step)
        lasted = growth.step - growth.since_step
        is_most = gained >= _EXPLAINED * growth.rate * lasted
        return list(holders) if series == _owner(growth.series) and is_most else []

    def _in_part(self, growth: Suspicion) -> tuple[Holder, ...]:
        """Return containers that gained a part of the growth, if only a little, during most of it."""
        step, holders = self._periodic.newest
        is_recent = 2 * (step - growth.since_step) >= growth.step - growth.since_step
        return holders if self._periodic.series == _owner(growth.series) and is_recent else ()

    def is_held(self, growth: Suspicion) -> bool:
        """Return True if a search has found variables of the program that hold what grows."""
        held = [holder for holder in self._known(growth) if holder.kind in _HELD]
        return _explain(held, growth)

    @property
    def _is_sure(self) -> bool:
        return all(holder.confidence == "high" for holder in self._periodic.holders)

    def _take_periodic(self, step: int) -> None:
        """Publish or tell what grows whenever memory rises, after such a rise."""
        periodic = self._periodic
        if periodic.holders and all(holder.bytes_left is not None for holder in periodic.holders):
            self._limited = periodic.series, step, periodic.holders
        growth = self._unexplained
        if growth is not None and _owner(growth.series) == periodic.series:
            if _explain(periodic.holders, growth, _RISES) and periodic.rises >= _CERTAIN:
                self._report_rises(growth, step)
        elif self._confirmed is None:
            growth = self._growth_of_rises(step)
            is_rare = periodic.is_sparse and periodic.is_weighed and periodic.rises >= LASTING
            if is_rare or self._has_taken_much(growth):
                self._report_rises(growth, step)
            elif self._growth is not None and _owner(self._growth.series) == periodic.series:
                self._tell_suspects(self._growth, step, self._named(self._growth))
            else:  # once can be chance
                known = periodic.holders or self._in_part(growth)
                is_certain = periodic.rises >= _CERTAIN
                self._tell_suspects(
                    growth, step, _large_enough(known, growth, _SUSPECT) if is_certain else []
                )

    def _growth_of_rises(self, step: int) -> Suspicion:
        periodic = self._periodic
        rate = periodic.rate
        return Suspicion(
            periodic.series, periodic.since, rate, 0.0, 2 * rate, periodic.level, None, step
        )

    def _has_taken_much(self, growth: Suspicion) -> bool:
        """Return True if a holder is sure, and the growth can't wait for the growth test."""
        steps = growth.step - growth.since_step
        if self._periodic.rises < _EARLY_RISES or steps < _EARLY_STEPS:
            return False
        is_sure = self._is_sure or self._periodic.is_sparse
        if not is_sure or not self.is_explained_by_rises(growth):
            return False
        taken = growth.rate * steps
        free = _free(growth)
        return free is not None and taken >= _EARLY_PART * (free + taken)

    def _report_rises(self, growth: Suspicion, step: int) -> None:
        holders = self._periodic.holders
        if _will_fit(growth, holders):
            self._tell_suspects(growth, step, holders)
            return
        self._unexplained = None
        self._earlier = holders
        self._periodic.stop()
        growth = growth._replace(step=step)
        for holder in holders:
            self._publish(_finding(growth, holder, is_main=holder is holders[0]))
        self._tell(growth.series, step)

    def _report(self, growth: Suspicion) -> None:
        holders, before, complete = self._known(growth), self._before, self._complete
        named = self._named(growth)
        self._confirmed = self._growth = self._before = None
        self._holders, self._complete = (), False
        self._earlier = holders or self._earlier
        named = named or self._filled_meanwhile(growth)
        if not named and (traced := cause_in_traces(self._traces, growth)) is not None:
            named = [traced]
        if not named and complete and before is not None:
            explained = per_step(holders)
            left = cause_by_elimination(growth, before, explained, is_ending=self._is_ending)
            named = [] if left is None else [left]
            self._unexplained = growth
            if (
                left is not None
                and left.kind == "native_library"
                and _explain(self._best(growth), growth)
            ):
                self._tell_suspects(growth, growth.step, self._best(growth))
                return
        if growth.series == FREE_LISTS or any(
            holder.kind == "allocator_free_lists" for holder in named
        ):
            named = between_free_memory(holders) or named
        is_garbage = self._is_ending and gc.isenabled() and named[:1] and named[0].kind == _CYCLES
        if is_garbage or _will_fit(growth, named):
            # Garbage that waits at the end is no leak: the collector would have freed it later.
            self._unexplained = growth
            self._tell_suspects(growth, growth.step, named)
            return
        if not named and not (complete and _is_of_larger_steps(growth)):
            self._publish_without_cause(growth, compiles=_compiles())
            self._unexplained = growth
        if any(holder in self._periodic.holders for holder in named):
            self._periodic.stop()  # they are reported now
        elif named and not _explain(named, growth):
            self._unexplained = growth  # the search goes on for what holds the rest
        for holder in named:
            self._publish(_finding(growth, holder, is_main=holder is named[0]))
        self._tell(growth.series, growth.step)


def _has_holders(growth: Suspicion) -> bool:
    """Return True if objects of this process can hold the memory that grows."""
    return growth.series in (HOST_ANON, FREE_LISTS, SHARED) or growth.series.endswith(ALLOCATED)


def _compiles() -> bool:
    if "torch" not in sys.modules:
        return False
    from memlog.torchside.internals import compiler_in_use  # noqa: PLC0415 - it loads parts of torch

    return compiler_in_use()


def _owner(series: str) -> str:
    # Free lists are a part of the process's memory, which the periodic search measures as a whole.
    return HOST_ANON if series == FREE_LISTS else series


def _explain(holders: Sequence[Holder], growth: Suspicion, part: float = _EXPLAINED) -> bool:
    return per_step(holders) >= part * growth.rate


def _large_enough(
    holders: Sequence[Holder], growth: Suspicion, part: float = _PART
) -> list[Holder]:
    return [holder for holder in holders if holder.bytes_per_step >= part * growth.rate]


def _are_told(line: Holder, held: Sequence[Holder]) -> bool:
    """Return True if what a line of Python makes is what one of the containers holds."""
    return any(
        _ALIKE * holder.bytes_per_step <= line.bytes_per_step <= holder.bytes_per_step / _ALIKE
        for holder in held
    )


def _free(growth: Suspicion) -> int | None:
    device = growth.series.removesuffix(ALLOCATED)
    return host_free(os.getpid()) if device == growth.series else device_free(device)


def _will_fit(growth: Suspicion, holders: Sequence[Holder]) -> bool:
    """Return True if containers with a limit hold what grows, and there is memory for all that they can gain.

    Such as a replay buffer: whether it will be filled is for the program to know. If the elements hold only
    a part of the growth, what lies between them goes on for as long as they are added.
    """
    left = [holder.bytes_left for holder in holders if holder.kind in _KEPT]
    known = [size for size in left if size is not None]
    if not known or len(known) < len(holders):
        return False
    free = _free(growth)
    left_of_growth = sum(known) * max(1.0, growth.rate / per_step(holders))
    return free is not None and left_of_growth <= _FITS * free


def _is_of_larger_steps(growth: Suspicion) -> bool:
    """Return True if a device's growth is no leak, given that no tensor of the watched steps stayed alive.

    What is in use after a step contains the step's inputs. So it rises while inputs become larger, or while
    more and more layers are trained. Such growth usually ends. If memory will be full before that, it counts.
    """
    if not growth.series.endswith(ALLOCATED):
        return False
    lasted = growth.step - growth.since_step
    return growth.forecast is None or growth.forecast[0] > growth.step + _SOON * lasted


def _finding(growth: Suspicion, holder: Holder, *, is_main: bool) -> Finding:
    """Return the finding about one holder.

    If ``is_main`` is true, the finding reports the rate and the forecast of the whole growth. Otherwise, it
    reports the rate of the holder, and no forecast.
    """
    general = finding_of(growth)
    memory = "the process's memory" if general.where is None else f"memory on {general.where}"
    explained = min(holder.bytes_per_step, growth.rate)
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
            f"It explains {format_bytes(explained)} per step; {memory} grows by "
            f"{format_bytes(growth.rate)} per step.",
            general.evidence[-1],
        ),
        confidence=min(
            (holder.confidence, confidence_in(growth)), key=("low", "medium", "high").index
        ),
        remedy=holder.remedy,
        memory=general.memory,
        is_part=not is_main,
    )

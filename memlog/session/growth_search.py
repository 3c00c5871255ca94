"""Search for the cause of growth in the training process, and judging there if no helper has judged.

This module is imported when growth is first suspected. A healthy run never imports it.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING

import msgspec

from memlog._internal.diagnostics import Diagnostics
from memlog.events import (
    ALLOCATED,
    HOST_ANON,
    SHARED,
    Batch,
    End,
    Event,
    Finding,
    HeapReading,
    Inquiry,
    Trace,
    now_us,
)
from memlog.facts.growth_findings import FREE_LISTS, GrowthFindings
from memlog.facts.judge import GrowthNews, RunJudge
from memlog.facts.rises import Rise
from memlog.facts.run_fold import RunFold
from memlog.facts.run_verdict import RunVerdict
from memlog.facts.verdict import verdict
from memlog.growth.series import Suspicion
from memlog.journal import RunDirectory
from memlog.probes.machine import host_free
from memlog.probes.process import collect_garbage, read_heap
from memlog.sink import is_installed

if TYPE_CHECKING:
    from memlog.leaks.inquiry import GrowthInquiry
    from memlog.leaks.other_causes import TrainersMemory

_HEAP_STEPS = 2
"""Number of steps between readings of the heap while growth is examined. Each reading takes 5 to 500 µs."""


class GrowthSearch:
    """Receiver of news about the growth of this process and its devices.

    ``is_traced`` returns whether the tracer traces the current step. ``last_step`` returns the number of the
    last step. ``begun`` is the start of the run in seconds, as `time.monotonic` returns it. ``traces`` are
    traced steps with exact figures.
    """

    def __init__(
        self,
        publish: Callable[[Event], object],
        diagnostics: Diagnostics,
        is_traced: Callable[[], bool],
        last_step: Callable[[], int],
        begun: float,
        traces: Sequence[Trace] = (),
    ) -> None:
        self._publish = publish
        self._last_step = last_step
        self._freed_at: dict[str, int] = {}
        """For each series, the last step before garbage was collected that explained its growth."""
        self._memory: TrainersMemory | _Garbage = _Garbage()
        self._inquiry: GrowthInquiry | _NoInquiry = _NoInquiry(publish)
        if is_installed("torch"):
            # Imported here: both import torch.
            from memlog.leaks.inquiry import GrowthInquiry  # noqa: PLC0415
            from memlog.leaks.other_causes import TrainersMemory  # noqa: PLC0415

            self._memory = TrainersMemory()
            self._inquiry = GrowthInquiry(publish, diagnostics, is_traced, begun, traces)
        self._suspected: set[str] = set()
        self._handled: dict[str, int] = {}
        self._reads_heap = self._is_ending = False

    @property
    def searching(self) -> bool:
        """True while steps are searched for objects that hold memory."""
        return self._inquiry.searching

    def take(self, news: GrowthNews) -> None:
        """Act on a verdict about a series.

        A new helper process judges the journal again from its beginning, so its verdicts can be old ones.
        """
        series = news.growth.series
        owner = HOST_ANON if series == FREE_LISTS else series
        if news.number <= self._handled.get(owner, 0):
            return
        self._handled[owner] = news.number
        if news.growth.step <= self._freed_at.get(owner, -1):
            return  # judged by levels with garbage that is freed since
        if news.verdict == "suspected":
            self._take_suspicion(news.growth)
        elif news.verdict == "confirmed":
            self._take_confirmation(news.growth, owner)
        else:
            self._suspected.discard(owner)
            self._inquiry.withdrawn(news.growth)
        self._reads_heap = not self._suspected.isdisjoint((HOST_ANON, SHARED))

    def take_early(self, series: str, rise: Rise) -> bool:
        """Begin a search before the growth test can suspect the growth. Return False if it is garbage."""
        rate = rise.rate
        growth = Suspicion(series, rise.since, rate, 0.0, 2 * rate, rise.level, None, rise.step)
        if self._memory.is_garbage(growth, is_confirmed=False, has_ended=False, is_early=True):
            return False
        self._inquiry.suspected(growth, is_early=True)
        return True

    def take_rises(self, series: str, rise: Rise) -> None:
        """Begin a search for what grows whenever the series rises. The growth test may not suspect it yet."""
        self._inquiry.rises(series, rise.since, rise.rate * (rise.step - rise.since))

    def after_step(self, step: int, event: Batch | None) -> None:
        """Continue the search after an optimizer step. ``event`` is the newest step that was published."""
        self._inquiry.after_step(step, event)
        if (self._reads_heap or self._inquiry.searching) and step % _HEAP_STEPS == 0:
            heap = read_heap()
            if heap is not None:
                self._publish(HeapReading(now_us(), step, heap.in_use, heap.idle))

    def ends(self) -> None:
        """Remember that the training has ended. Memory that its functions held can have been freed.

        `finish` takes this back.
        """
        self._is_ending = True
        self._inquiry.ends()

    def finish(self) -> None:
        """End the search. Publish the growth if it is confirmed. More steps may follow."""
        self._inquiry.finish()
        self._is_ending = False

    def _take_suspicion(self, growth: Suspicion) -> None:
        if self._is_garbage(growth, is_confirmed=False):
            return
        self._suspected.add(growth.series)
        self._inquiry.suspected(growth)

    def _take_confirmation(self, growth: Suspicion, owner: str) -> None:
        if self._is_garbage(growth, is_confirmed=True):
            self._inquiry.withdrawn(growth)
            self._suspected.discard(owner)
            return
        if growth.series != FREE_LISTS:  # the growth of free lists is examined further
            self._suspected.discard(owner)
        self._inquiry.confirmed(growth)

    def _is_garbage(self, growth: Suspicion, *, is_confirmed: bool) -> bool:
        """Collect garbage. If it explains the growth, publish this and return True."""
        series = HOST_ANON if growth.series == FREE_LISTS else growth.series
        if series != HOST_ANON and not series.endswith(ALLOCATED):
            return False
        if self._inquiry.is_explained_by_rises(growth):
            return False  # a variable holds it. A collection would take 0.1 s and more
        if self._is_ending and self._inquiry.is_held(growth):
            return False  # a collection would free what the program's functions held
        explains = self._memory.is_garbage(
            growth,
            is_confirmed=is_confirmed,
            has_ended=self._is_ending and series in self._suspected,
            is_early=not is_confirmed and self._inquiry.waits,
        )
        if explains:
            self._freed_at[series] = self._last_step()
            self._publish(Inquiry(now_us(), growth.step, series, searching=False, garbage=True))
        return explains


class _Garbage:
    """Garbage of a process without torch."""

    def is_garbage(
        self, growth: Suspicion, *, is_confirmed: bool, has_ended: bool, is_early: bool = False
    ) -> bool:
        """Collect garbage. Return True if it explains the growth. After the last step, collect nothing."""
        collection = None if has_ended else collect_garbage(old=is_confirmed and not is_early)
        return collection is not None and collection.explains(growth.rise)


class _NoInquiry:
    """Receiver of verdicts in a process without torch, which the search for holders needs.

    Confirmed growth is published without a cause. For the methods, see `memlog.leaks.inquiry.GrowthInquiry`.
    """

    searching = waits = False

    def __init__(self, publish: Callable[[Event], object]) -> None:
        self._publish = publish
        self._findings = GrowthFindings(self._take)

    def _take(self, event: Event) -> None:
        if isinstance(event, Finding) and event.kind == "growth":
            event = msgspec.structs.replace(event, remedy=_REMEDY)
        self._publish(event)

    def confirmed(self, growth: Suspicion) -> None:
        self._findings(growth)

    def suspected(self, growth: Suspicion, *, is_early: bool = False) -> None: ...

    def withdrawn(self, growth: Suspicion) -> None: ...

    def rises(self, series: str, since: int, rise: float) -> None: ...

    def after_step(self, step: int, event: Batch | None) -> None: ...

    def ends(self) -> None: ...

    def finish(self) -> None: ...

    def is_explained_by_rises(self, growth: Suspicion) -> bool:  # noqa: ARG002 - nothing is searched
        return False

    def is_held(self, growth: Suspicion) -> bool:  # noqa: ARG002 - see above
        return False


_REMEDY = (
    "Look for what a step keeps, such as results in lists, and caches. memlog looks for it itself if PyTorch "
    "is installed: pip install torch"
)

_SECONDS = 5.0
"""Maximum seconds for judging. The growth of a longer run is judged by commands that read the run."""


def judge_run(
    run: RunDirectory,
    rules: Sequence[str],
    publish: Callable[[Event], object],
    on_growth: Callable[[GrowthNews], object],
    diagnostics: Diagnostics,
) -> dict[str, str]:
    """Judge a run from its journal, if there is time to read it all.

    Return the alert rules about figures of this process that were never judged, each with the reason. What a
    helper process has published before is not published again.
    """
    judge = RunJudge(publish, on_growth, lambda: host_free(os.getpid()), diagnostics)
    engine = None
    if rules:
        from memlog.alerts import parse_rules  # noqa: PLC0415 - only with alert rules
        from memlog.alerts.engine import engine_for  # noqa: PLC0415 - see above

        engine = engine_for(parse_rules(rules), judge.publish, diagnostics, os.getpid())
    judge.begin(engine, list(run.events("helper")))
    deadline = time.monotonic() + _SECONDS
    for event in _own_events(run):
        judge.take(event)
        if time.monotonic() > deadline:
            return {}
    judge.finish()
    return {} if engine is None else engine.never_judged(sampled=False)


def verdict_on(run: RunDirectory, end: End) -> RunVerdict | None:
    """Return the verdict on a run from its journal; ``None`` if there was no time to read it all.

    ``end`` is the run's end, if the journal has none.
    """
    facts, deadline = RunFold(judge=False), time.monotonic() + _SECONDS
    for file in run.files():
        for entry in file.read():
            facts.take_entry(entry)
            if time.monotonic() > deadline:
                return None
    with facts.ended(end):
        return verdict(facts, facts.status(alive=False))


def _own_events(run: RunDirectory) -> Iterator[Event]:
    """Yield the events that this process has published."""
    name = f"trainer-{os.getpid()}"
    for file in run.files("trainer"):
        if file.process == name:
            for entry in file.read():
                yield entry.event

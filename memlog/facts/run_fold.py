"""Facts about a run, from one pass over its events and in bounded memory. Every report reads them."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Literal, TypeAlias

from msgspec.structs import replace

from memlog.events import (
    ALLOCATED,
    HOST_ANON,
    Alert,
    Batch,
    Device,
    End,
    Epoch,
    Event,
    Finding,
    Health,
    HeapReading,
    Inquiry,
    Loss,
    OutOfMemory,
    PeaksBySize,
    Phase,
    RankDoubt,
    RankFailure,
    Reading,
    Sample,
    SavedState,
    Status,
    StepInputs,
    Trace,
    readings,
)
from memlog.facts.detector import CHILD_FLOOR, SAMPLES, GrowthDetector
from memlog.facts.growth_findings import ProcessPiles, confidence_in, finding_of
from memlog.facts.later_memory import KIND, SAVES, LongestBatch, finding_of_longest, longest_batch
from memlog.facts.levels import LevelFold, PeakFold, TraceFold
from memlog.facts.oom_cause import has_gone_on, is_title
from memlog.findings import ranked
from memlog.growth.series import Suspicion
from memlog.journal import Entry, RunDirectory

RunStatus: TypeAlias = Literal["running"] | Status
"""Status of a run: how it ended, or ``running``."""

_WELL = ("running", "finished")
"""Status of a run that has not ended badly."""
NOT_SEARCHED = "The run ended before memlog had searched for the cause."
SEARCH_INTERRUPTED = (
    "The run ended before memlog had confirmed this: it is the state of a search for the cause."
)
_EXPLAINED = 0.5
"""A finding tells a growth if its rate is at least this part of the growth's."""


class RunFold:
    """Steps, peaks, memory after the steps, traced steps, findings and the failure that ended a run.

    ``judge`` is False if the run ended with an end event. Its growth was judged then, and is not judged
    again, which takes half of the time.

    Attributes:
        first_step: Number of the first recorded step; ``None``: there was none.
        last_step: Number of the last known step; ``None``: there was none.
        failure: Failed allocation after which the program did not go on, as far as known; ``None``: none.
        failure_title: Title of the report on the run's bad end; ``None``: there is no report yet.
        rank_failure: Bad end of the training, if several ranks train together; ``None``: none is known.
        rank_doubt: Another rank's memory, if it rose for an unknown reason; ``None``: none is known.
        host_limit: Bytes that the training's processes may use together; ``None``: unknown.
        cgroup_limit: Newest limit of the control group; ``None``: there is no limit, or it is unknown.
        inquiries: Newest state of the search for a cause, by the series that seemed to grow.
        to_save: Size of what a checkpoint saves; ``None``: unknown.
        has_lost_events: True if the training process could not write some events.
    """

    def __init__(self, *, judge: bool = True) -> None:
        self.first_step: int | None = None
        self.last_step: int | None = None
        self.peaks = PeakFold()
        self.levels = LevelFold()
        self.traces = TraceFold()
        self.devices: dict[str, Device] = {}
        self.failure: OutOfMemory | None = None
        self.failure_title: str | None = None
        self.rank_failure: RankFailure | None = None
        self.rank_doubt: RankDoubt | None = None
        self.end: End | None = None
        self.to_save: SavedState | None = None
        self._has_saved = False
        self.has_lost_events = False
        self.host_limit: int | None = None
        self.cgroup_limit: int | None = None
        self._counted: int | None = None
        self._free: int | None = None
        self._findings: list[Finding] = []
        self._sized: PeaksBySize | None = None
        self.inquiries: dict[str, Inquiry] = {}
        self._growth: dict[str, Suspicion] = {}
        self._detector = GrowthDetector(lambda: self._free, self._grew)
        self._judges, self._is_judged = judge, False
        self._processes = ProcessPiles(CHILD_FLOOR, SAMPLES, lambda *_: None)
        self._newest_us = self._read = 0

    def take_entry(self, entry: Entry, found: list[Reading] | None = None) -> None:
        """Add an event of a journal, in the journal's order. ``found``: its readings, if known."""
        event = entry.event
        if isinstance(event, Batch) and self.first_step is None and entry.seq > self._read:
            # Events before it are missing. So an earlier step may have been the first.
            self.first_step = entry.header.initial_step
        self._read += 1
        self.take(event, found)

    def take(self, event: Event, found: list[Reading] | None = None) -> None:
        """Add an event, in the order in which it was published. ``found``: its readings, if known."""
        found = list(readings(event)) if found is None else found
        if found:
            self.peaks.take(event, found)
        if isinstance(event, Batch):
            self._take_step(event.step)
            if self.first_step is None or event.step < self.first_step:
                self.first_step = event.step
            self.levels.take(event.step, found)
            if self._judges:
                self._detector.take_step(event.step, found)
            else:
                self._detector.untouched.take(event.step, found)
            # A complete step shows that the program went on after the failure.
            self.failure = None
            self._newest_us = event.time_us
        elif isinstance(event, Sample):
            self._take_sample(event)
        elif isinstance(event, Trace):
            self.traces.take(event)
        elif isinstance(event, Health):
            self._take_health(event)
        elif isinstance(event, (Loss, Epoch)):
            self._take_step(event.step)
        elif isinstance(event, (Inquiry, HeapReading, Device, StepInputs)):
            self._take_about_growth(event)
        else:
            self._take_result(event)
            self._take_prediction(event)

    def _take_about_growth(self, event: Inquiry | HeapReading | Device | StepInputs) -> None:
        self._detector(event)
        if isinstance(event, Device):
            self.devices[event.name] = event
            self.peaks.expect(event.name)
        elif isinstance(event, Inquiry):
            self.levels.take_search(goes_on=event.searching)
            if event.garbage:
                self.inquiries.pop(event.series, None)
            else:
                self.inquiries[event.series] = event
        elif isinstance(event, HeapReading) and event.freed is None:
            self.levels.take_heap(event.step, event.in_use)

    def _take_result(self, event: Event) -> None:
        if isinstance(event, Finding):
            self._findings.append(event)
        elif isinstance(event, OutOfMemory):
            self.failure = event
        elif isinstance(event, Alert):
            if is_title(event):
                self.failure_title = event.title
        elif isinstance(event, End):
            self.end = event
            if self.failure is not None and has_gone_on(self.failure, event):
                self.failure = None
        elif isinstance(event, RankFailure):
            self.rank_failure = event
        elif isinstance(event, RankDoubt):
            self.rank_doubt = event

    def _take_prediction(self, event: Event) -> None:
        if isinstance(event, PeaksBySize):
            self._sized = event
        elif isinstance(event, SavedState):
            self.to_save = event
            self._has_saved &= event.way is None
        elif isinstance(event, Phase) and event.label == SAVES:
            self._has_saved |= event.error is None

    def _take_step(self, step: int | None) -> None:
        if step is not None and (self.last_step is None or step > self.last_step):
            self.last_step = step

    def _take_health(self, event: Health) -> None:
        self._take_step(event.step)
        self.has_lost_events |= any(reason.startswith("journal_") for reason in event.dropped)
        if event.steps is not None:
            self._counted = max(event.steps, self._counted or 0)

    def _take_sample(self, event: Sample) -> None:
        # An older memlog recorded the container's limit only.
        limit = event.cgroup_limit if event.host_limit is None else event.host_limit
        self.host_limit = self.host_limit if limit is None else limit
        self.cgroup_limit = event.cgroup_limit
        left = None if limit is None or event.tree_pss is None else max(limit - event.tree_pss, 0)
        if event.step is not None:
            self._processes.take(event.step, event.children)
        known = [free for free in (left, event.available) if free is not None]
        self._free = min(known, default=None)

    def _grew(self, growth: Suspicion) -> None:
        self._growth[growth.series] = growth

    @property
    def processes(self) -> tuple[str, int] | None:
        """Kind of child processes that may pile up, and how many there are; ``None``: there is none."""
        return self._processes.may_pile_up()

    def status(self, *, alive: bool) -> RunStatus:
        """Return the run's status; ``killed`` if its process ended without an end event.

        If another rank failed first, the status is that rank's. ``alive``: True if the training process was
        alive before the journal was read.
        """
        if self.end is None and alive:
            return "running"
        if self.rank_failure is not None:
            return self.rank_failure.status
        return "killed" if self.end is None else self.end.status

    @contextmanager
    def ended(self, end: End | None) -> Iterator[None]:
        """Take ``end`` as the run's end within the block, if the run has none yet.

        For a user's run in a tracker that ends while memlog's run goes on.
        """
        known, self.end = self.end, self.end or end
        try:
            yield
        finally:
            self.end = known

    @property
    def steps(self) -> int:
        """Number of recorded steps. If the journal lacks the count, the steps from the first to the last."""
        if self.last_step is None:
            return 0
        return self._counted or self.last_step - (self.first_step or 0) + 1

    def growth(self, status: RunStatus) -> dict[str, Suspicion]:
        """Return the growth of each series that grows, by the test that the training process does, too.

        Growth that has ended does not count. If the run was killed, growth that lasted until the last step
        counts. If the run ended with an end event, the result is empty: the training process has judged its
        growth.
        """
        if self.end is not None:
            return {}
        if status != "running" and not self._is_judged:
            self._is_judged = True
            self._detector.finish()
        return {name: growth for name, growth in self._growth.items() if not self._has_ended(name)}

    def fills_a_buffer(self, rate: float, since: int | None = None) -> bool:
        """Return True if the process took hardly any memory from the system for its growth.

        ``rate`` is the growth in bytes a step since step ``since`` (``None``: the first one). The result is
        False if the address space is not known.
        """
        since = self.first_step or 0 if since is None else since
        return self._detector.untouched.is_filled(HOST_ANON, rate, since)

    def have_inputs_grown(self, since: int | None = None) -> bool:
        """Return True if the steps' inputs have become larger lately, which explains free memory."""
        since = self.first_step or 0 if since is None else since
        return self._detector.have_inputs_grown(since, self.last_step or 0)

    def _has_ended(self, series: str) -> bool:
        """Return True if memory that grew has been steady since then, as a cache that is full."""
        return (series == HOST_ANON or series.endswith(ALLOCATED)) and self._is_steady(series)

    def findings(self, status: RunStatus) -> list[Finding]:
        """Return what was found, the most important first, without `past_findings`.

        If the run ended without an end event, nobody has judged its growth a last time. So the result
        contains growth that lasted until the end, with the suspects of a search that was under way.
        """
        findings = [
            finding
            for finding in self._with_longest()
            if finding.kind != KIND or not self._has_saved
        ]
        failed = self.rank_failure
        if self.end is None and (status == "killed" or (failed and status == "failed")):
            findings = [*self.at_the_end(), *findings]
        if failed is None and status in _WELL:
            return ranked(finding for finding in findings if not self.levels.is_full(finding))
        # Growth that has ended can still be why a run ended badly, so that all findings stay.
        # First what was found in the rank that failed first, or in this one.
        rank = None if failed is None or failed.run is None else failed.rank
        return sorted(ranked(findings), key=lambda finding: finding.rank != rank)

    def past_findings(self, status: RunStatus) -> list[Finding]:
        """Return findings of growth that ended long ago, as that of a cache that is full by now."""
        if self.rank_failure is not None or status not in _WELL:
            return []
        return ranked(finding for finding in self._findings if self.levels.is_full(finding))

    @property
    def longest_batch(self) -> LongestBatch | None:
        """Memory of a batch with the longest sample; ``None``: unknown, or the peaks follow no dimension."""
        if self._sized is None:
            return None
        return longest_batch(self._sized, self.peaks.summary(), self.devices, self.host_limit)

    def _with_longest(self) -> Iterator[Finding]:
        """Yield the findings. What they say about the longest batch is what is known by now."""
        longest = self.longest_batch
        for finding in self._findings:
            own = finding.rank is None
            if (
                own
                and finding.kind == "larger_steps"
                and longest
                and longest.where == finding.where
            ):
                finding = replace(finding, evidence=(*finding.evidence, longest.text))  # noqa: PLW2901 - one name
            if not (own and finding.kind == "longest_batch"):
                yield finding
        if longest is not None and longest.fits is False:
            yield finding_of_longest(longest, self.last_step)

    def at_the_end(self) -> list[Finding]:
        """Return findings about growth that lasted until a run ended without an end event."""
        growing = self.growth("killed")
        findings: list[Finding] = []
        for series, inquiry in self.inquiries.items():
            if inquiry.suspects and not inquiry.will_fit and not self._is_steady(series):
                main, *others = inquiry.suspects
                judged = growing.get(series)
                # The search may have begun on an early sign, whose rate is rough.
                if judged is not None:
                    main = replace(
                        main,
                        since_step=judged.since_step,
                        rate=judged.rate,
                        forecast=judged.forecast,
                    )
                elif main.since_step is not None:
                    rate = self.levels.rate_since(owner_of(series), main.since_step)
                    main = main if rate is None else replace(main, rate=rate, forecast=None)
                findings += [
                    replace(finding, evidence=(*finding.evidence, SEARCH_INTERRUPTED))
                    for finding in (main, *others)
                ]
        explained = {series for series, inquiry in self.inquiries.items() if inquiry.suspects}
        for series, growth in growing.items():
            if (
                series not in explained
                and confidence_in(growth) == "high"
                and not self._is_explained(growth)
            ):
                general = finding_of(growth)
                findings.append(
                    replace(
                        general,
                        time_us=self._newest_us,
                        evidence=(*general.evidence, NOT_SEARCHED),
                    )
                )
        known = {
            (finding.kind, finding.where) for finding in self._findings if finding.rank is None
        }
        return [finding for finding in findings if (finding.kind, finding.where) not in known]

    def _is_explained(self, growth: Suspicion) -> bool:
        """Return True if a finding about the same memory tells most of a growth."""
        findings = [
            finding
            for finding in self._findings
            if finding.rank is None and finding.kind != "larger_steps"
        ]
        rates = [
            finding.rate or 0.0 for finding in findings if finding.memory == owner_of(growth.series)
        ]
        return max(rates, default=0.0) >= _EXPLAINED * growth.rate

    def _is_steady(self, series: str) -> bool:
        known = self.levels.evidence(owner_of(series))
        return known is not None and known.since is not None


def owner_of(series: str) -> str:
    """Return ``host``, or the name of the device whose memory the series is, such as ``cuda0``."""
    owner, dot, _ = series.rpartition(".")
    return owner if dot else "host"


def facts_of(run: RunDirectory) -> RunFold:
    """Return the facts about a run, in one pass over its journal."""
    facts = RunFold(judge=run.end() is None)
    for file in run.files():
        for entry in file.read():
            facts.take_entry(entry)
    return facts

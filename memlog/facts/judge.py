"""Judge of a run: growth, the allocator's retries, the first checkpoint, from the run's events as they come.

The helper process judges the run that it serves. If there is no helper process, the training process judges
its own run at the end, from the journal, by the same code. A new helper process judges the journal from its
beginning. What an earlier one has published is not published again.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from functools import partial
from typing import TypeAlias

import msgspec

from memlog._internal.diagnostics import Diagnostics
from memlog.bus import EventBus
from memlog.events import (
    ALLOCATED,
    HOST_ANON,
    SHARED,
    Alert,
    Batch,
    ChildReading,
    Device,
    Event,
    Finding,
    PeaksBySize,
    Phase,
    Reading,
    Sample,
    SavedState,
    readings,
)
from memlog.facts.allocator_retries import AllocatorRetries
from memlog.facts.detector import GrowthDetector
from memlog.facts.growth_findings import FREE_LISTS, GrowthFindings
from memlog.facts.later_memory import FirstCheckpoint, finding_of_longest
from memlog.facts.run_fold import RunFold
from memlog.facts.run_verdict import FindingAlerts, RunVerdict
from memlog.facts.verdict import verdict
from memlog.growth.series import Suspicion, Verdict


class GrowthNews(msgspec.Struct, frozen=True, array_like=True):
    """Verdict on the growth of a series whose holders can be objects of the training process."""

    verdict: Verdict
    number: int
    """Number of verdicts on this series so far. Growth of the heap's free lists counts as the process's."""
    growth: Suspicion


RuleJudge: TypeAlias = Callable[[Event, list[Reading]], object]
"""Judge of alert rules. It gets each event and the event's readings."""
GrowthReceiver: TypeAlias = Callable[[GrowthNews], object]


class RunJudge:
    """Receiver of a run's events. It publishes findings and alerts, and passes on verdicts on growth.

    ``on_growth`` gets verdicts on growth whose cause can be searched in the training process. ``free``
    returns the bytes that the training process can still take; ``None``: unknown.

    Attributes:
        facts: Facts about the run. They include what `publish` has published only if the caller adds it.
    """

    def __init__(
        self,
        publish: Callable[[Event], object],
        on_growth: GrowthReceiver,
        free: Callable[[], int | None],
        diagnostics: Diagnostics,
    ) -> None:
        self._publish = publish
        self._on_growth = on_growth
        self._diagnostics = diagnostics
        self._published: Counter[tuple[object, ...]] = Counter()
        self._numbers: Counter[str] = Counter()
        self._alerts = FindingAlerts(self.publish)
        self._without_cause = GrowthFindings(self.publish)
        self._detector = GrowthDetector(
            free, *(partial(self._grew, verdict) for verdict in _VERDICTS)
        )
        self._retries = AllocatorRetries(self.publish)
        self._fits: bool | None = None
        """Whether the longest batch fits, as far as it is known."""
        self.facts = RunFold(judge=False)
        self._bus = EventBus(diagnostics)
        self._rules: RuleJudge | None = None
        self._bus.subscribe(self._take)
        self._bus.subscribe(self._retries, Batch, Device)
        self._bus.subscribe(FirstCheckpoint(self.publish, free), SavedState, Sample, Phase)

    def begin(self, rules: RuleJudge | None, earlier: Sequence[Event]) -> None:
        """Add the alert rules, and take what an earlier helper process has published about this run.

        What it has found or told is not published again.
        """
        self._rules = rules
        samples = [event for event in earlier if isinstance(event, Sample)]
        for event in earlier:
            if not isinstance(event, Sample):
                self.facts.take(event)
                self._published.update([_identity(event)])
        for sample in samples:  # last: a rule may publish again what is known by now
            self.take(sample)

    def take(self, event: Event) -> None:
        """Take the next event of the training process, or the next sample of the helper process."""
        self._bus.publish(event)

    def take_children(self, step: int, children: Sequence[ChildReading]) -> None:
        """Take readings of the child processes that are in no event."""
        self._detector.take_children(step, children)

    def finish(self) -> None:
        """Judge the steps so far, as if the run ended now. More steps may follow.

        Without new steps, a second call publishes nothing.
        """
        with self._diagnostics.contained("judging growth a last time"):
            self._detector.finish()
            self._retries.finish()

    @property
    def verdict(self) -> RunVerdict:
        """Verdict on the run, which has ended."""
        return verdict(self.facts, self.facts.status(alive=False))

    def publish(self, event: Event) -> None:
        """Publish a finding or an alert, unless it was published before."""
        identity = _identity(event)
        if self._published[identity]:
            # Each earlier event suppresses one of the same identity.
            self._published[identity] -= 1
        else:
            self._publish(event)
        if isinstance(event, Finding):
            self._alerts(event)

    def _take(self, event: Event) -> None:
        event_readings = list(readings(event))
        self.facts.take(event, event_readings)
        if isinstance(event, PeaksBySize):
            longest = self.facts.longest_batch
            fits = None if longest is None else longest.fits
            # Published when the answer changes to no, not again at each event.
            if longest is not None and fits is False and self._fits is not False:
                self.publish(finding_of_longest(longest, event.step))
            self._fits = fits
        elif isinstance(event, Batch):
            self._detector.take_step(event.step, event_readings)
        else:
            self._detector(event)
        if self._rules is not None:
            self._rules(event, event_readings)

    def _grew(self, verdict: Verdict, growth: Suspicion) -> None:
        series = growth.series
        if series in (HOST_ANON, FREE_LISTS, SHARED) or series.endswith(ALLOCATED):
            counted = HOST_ANON if series == FREE_LISTS else series
            self._numbers[counted] += 1
            self._on_growth(GrowthNews(verdict, self._numbers[counted], growth))
        elif verdict == "confirmed":
            self._without_cause(growth)


_VERDICTS: tuple[Verdict, ...] = ("confirmed", "suspected", "withdrawn")


def _identity(event: Event) -> tuple[object, ...]:
    if isinstance(event, Alert):
        return (event.rule, event.title, event.step, event.evaluation, event.epoch)
    return (event.kind, event.where, event.title) if isinstance(event, Finding) else ()

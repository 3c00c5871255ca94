"""Accumulate a journal's events in bounded memory: aggregates of frequent events, lists of rare ones."""

from __future__ import annotations

from collections import Counter

from memlog.events import (
    Alert,
    Artifact,
    Batch,
    Event,
    Finding,
    Health,
    Origin,
    OutOfMemory,
    Parameters,
    Phase,
    Recorded,
    Run,
    Scope,
    StepInputs,
)
from memlog.facts.levels import UNKNOWN, peak_kind
from memlog.facts.oom_cause import has_gone_on
from memlog.facts.run_fold import RunFold
from memlog.journal import Binding, Entry, Header
from memlog.metrics import parameters_of
from memlog.reports.labels import LabelFold
from memlog.reports.metric_fold import MetricFold
from memlog.reports.phases import PhaseFold
from memlog.reports.survived import batch_sizes

RECORD = 1.05
"""A step with a peak this many times the peak before is a record: memlog publishes its inputs, if it knows
them."""
MAX_LISTED = 1_000
"""Maximum number of alerts, and of artifacts, that are kept."""

_LATE = (Alert, Artifact, Finding)
"""Events that ``memlog sync`` writes about a run whose process and helper process were killed."""


class Accumulator:
    """Aggregates of all events of a run, in bounded memory. ``judge``: see `RunFold`."""

    def __init__(self, *, judge: bool = True) -> None:
        self.published = 0
        self.newest_us: int | None = None
        """Unix time of the newest event, in microseconds."""
        self.last_us: int | None = None
        """The same without events that a later command can add to a run that is over."""
        self.metrics = MetricFold()
        self.facts = RunFold(judge=judge)
        self.labels = LabelFold()
        self.phases = PhaseFold()
        self._newest_inputs: StepInputs | None = None
        self.survived: Counter[int] = Counter()
        """Number of failed allocations by the step that was completed after them, else by the last step."""
        self.survived_batches: list[int] = []
        self._failed: dict[int, OutOfMemory] = {}
        """Failed allocations since the last complete step, by their times."""
        self.begin: Run | None = None
        self.parameters: dict[str, str] = {}
        self.alerts: list[Alert] = []
        self._artifacts: dict[str, Artifact] = {}
        self.health: dict[str, tuple[Health, int]] = {}
        """Newest health event of each process, and the number of steps up to this event."""
        self.bindings: dict[str, dict[str, Binding]] = {}
        """The user's runs in trackers, by backend and by id."""
        self.dropped: Counter[str] = Counter()
        """Number of events that could not be read or are missing, by reason."""
        self.omitted: Counter[str] = Counter()
        """Number of alerts and of artifacts beyond the first `MAX_LISTED`."""
        self._header: Header | None = None
        self._has_older_names = False
        self._next: dict[str, int] = {}
        self._missing: Counter[str] = Counter()

    def lost(self, process: str, unreadable: int) -> int:
        """Return the number of a process's events that are missing for an unknown reason.

        ``unreadable`` is the number of events that are missing for a known reason, such as a damaged line.
        """
        return max(self._missing[process] - unreadable, 0)

    def take(self, process: str, entry: Entry) -> None:
        if entry.header is not self._header:
            self._take_header(entry.header)
        self._missing[process] += max(entry.seq - self._next.get(process, 0), 0)
        self._next[process] = max(entry.seq + 1, self._next.get(process, 0))
        event = entry.event
        self.metrics.take(event, older=self._has_older_names)
        self.facts.take_entry(entry)
        self.published += 1
        if self.newest_us is None or event.time_us > self.newest_us:
            self.newest_us = event.time_us
        if not isinstance(event, _LATE) and (self.last_us is None or event.time_us > self.last_us):
            self.last_us = event.time_us
        if isinstance(event, Health):
            covered = event.steps  # preferred: the numbers of a trainer's steps can have gaps
            if covered is None:
                covered = 0 if event.step is None else event.step + 1 - entry.header.initial_step
            self.health[process] = event, covered
        elif isinstance(event, StepInputs):
            self._newest_inputs = event
        elif not isinstance(event, Batch):
            self._note(event)
        if self._failed:
            self._note_survival(event)

    def _note_survival(self, event: Event) -> None:
        """Count the failed allocations if ``event`` shows that the program went on."""
        *_, newest = self._failed.values()
        if has_gone_on(newest, event):
            step = event.step if isinstance(event, Batch) else newest.step
            self.survived[step or 0] += len(self._failed)
            self.survived_batches += batch_sizes([*self._failed.values()])
            self._failed.clear()

    @property
    def largest_step(self) -> StepInputs | None:
        """Inputs of the step that made the run's peak, or a peak that is less than 5 % lower.

        ``None`` if they are unknown. If an evaluation or a phase before this step made the same peak, the
        step did not make it.
        """
        event = self._newest_inputs
        if event is None:
            return None
        most = self.facts.peaks.of(peak_kind(event.device), UNKNOWN)
        if most.bytes is None:
            return event
        is_earlier = most.step is not None and most.step < event.step
        return event if most.bytes < RECORD * event.peak and not is_earlier else None

    def _take_header(self, header: Header) -> None:
        self._header, self._has_older_names = header, header.has_older_names
        for backend, binding in header.bindings.items():
            # Keep the newest binding of a run, because the run's first step may change the offset.
            self.bindings.setdefault(backend, {})[binding.run_id] = binding

    def _note(self, event: Event) -> None:
        if isinstance(event, Run):
            self.begin = self.begin or event
        elif isinstance(event, (Parameters, Origin)):
            found = parameters_of(event)
            self.parameters |= found.values if found else {}
        elif isinstance(event, OutOfMemory):
            self._failed[event.time_us] = event
        elif isinstance(event, Alert):
            self._list(event)
        elif isinstance(event, Artifact):
            self._replace(event)
        elif isinstance(event, Scope):
            self.labels.take_scope(event)
        elif isinstance(event, Recorded):
            self.labels.take_point(event)
        elif isinstance(event, Phase):
            self.phases.take(event)

    @property
    def artifacts(self) -> list[Artifact]:
        """The run's artifacts, the newest last. Of several artifacts with the same name, only the newest."""
        return sorted(self._artifacts.values(), key=lambda event: event.time_us)

    def _replace(self, event: Artifact) -> None:
        earlier = self._artifacts.get(event.name)
        if earlier is None and len(self._artifacts) >= MAX_LISTED:
            self.omitted["artifacts"] += 1
        elif earlier is None or earlier.time_us <= event.time_us:
            self._artifacts[event.name] = event

    def _list(self, event: Alert) -> None:
        if len(self.alerts) < MAX_LISTED:
            self.alerts.append(event)
        else:
            self.omitted["alerts"] += 1

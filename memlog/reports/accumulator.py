"""Accumulate a journal's events in bounded memory: aggregates of frequent events, lists of rare ones."""

from __future__ import annotations

from collections import Counter

from memlog.events import (
    Alert,
    Artifact,
    Batch,
    Device,
    End,
    Epoch,
    Event,
    Health,
    Loss,
    Origin,
    Parameters,
    Phase,
    Recorded,
    Run,
    Scope,
    StepInputs,
)
from memlog.journal import Binding, Entry, Header
from memlog.metrics import parameters_of
from memlog.reports.aggregates import MetricFold, PeakFold
from memlog.reports.labels import LabelFold
from memlog.reports.phases import PhaseFold
from memlog.reports.schema import RunStatus
from memlog.reports.traced_steps import TraceFold
from memlog.reports.verdict_fold import VerdictFold

MAX_LISTED = 1_000
"""Maximum number of alerts, and of artifacts, that are kept."""


class Accumulator:
    """Aggregates of all events of a run, in bounded memory."""

    def __init__(self) -> None:
        self.published = 0
        self.newest_us: int | None = None
        """Unix time of the newest event, in microseconds."""
        self.steps = 0
        """Number of the last step + 1; 0: there was no step."""
        self.metrics = MetricFold()
        self.peaks = PeakFold()
        self.labels = LabelFold()
        self.phases = PhaseFold()
        self.traces = TraceFold()
        self.verdict = VerdictFold()
        self.largest_step: StepInputs | None = None
        """Newest `StepInputs` event: the inputs of a step that raised the run's peak."""
        self.begin: Run | None = None
        self.end: End | None = None
        self.devices: dict[str, Device] = {}
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
        self.peaks.take(event)
        self.traces.take(event)
        self.verdict.take(event)
        self.published += 1
        if self.newest_us is None or event.time_us > self.newest_us:
            self.newest_us = event.time_us
        if isinstance(event, (Batch, Loss, Epoch, Health)) and event.step is not None:
            self.steps = max(self.steps, event.step + 1)
        if isinstance(event, Health):
            covered = event.steps  # preferred: the numbers of a trainer's steps can have gaps
            if covered is None:
                covered = 0 if event.step is None else event.step + 1 - entry.header.initial_step
            self.health[process] = event, covered
        elif isinstance(event, StepInputs):
            self.largest_step = event
        elif not isinstance(event, Batch):
            self._note(event)

    def _take_header(self, header: Header) -> None:
        self._header, self._has_older_names = header, header.has_older_names
        for backend, binding in header.bindings.items():
            # Keep the newest binding of a run, because the run's first step may change the offset.
            self.bindings.setdefault(backend, {})[binding.run_id] = binding

    def _note(self, event: Event) -> None:
        if isinstance(event, Run):
            self.begin = self.begin or event
        elif isinstance(event, End):
            self.end = event
        elif isinstance(event, Device):
            self.devices[event.name] = event
            self.peaks.expect(event.name)
        elif isinstance(event, (Parameters, Origin)):
            found = parameters_of(event)
            self.parameters |= found.values if found else {}
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

    def status(self, *, alive: bool) -> RunStatus:
        """Return the run's status; ``killed`` if its process ended without an end event.

        ``alive``: True if the training process was alive before the journal was read.
        """
        if self.end is not None:
            return self.end.status
        return "running" if alive else "killed"

    @property
    def last_step(self) -> int | None:
        """Number of the last step; ``None``: there was none."""
        return self.steps - 1 if self.steps else None

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

"""Accumulate a journal's events in bounded memory: aggregates of frequent events, lists of rare ones."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from itertools import pairwise
from typing import NamedTuple

from memlog._internal.terminal import format_bytes
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
    PeakSource,
    Phase,
    Reading,
    Recorded,
    Run,
    Scope,
    StepInputs,
    changes,
    main_readings,
    readings,
)
from memlog.facts.levels import UNKNOWN, Peak, peak_kind
from memlog.facts.oom_cause import has_gone_on
from memlog.facts.run_fold import RunFold
from memlog.journal import Binding, Entry, Header
from memlog.metrics import axis_and_index, parameters_of, values
from memlog.reports.postmortem import batch_sizes
from memlog.reports.schema import (
    Levels,
    MetricSummary,
    PhaseFacts,
    PhasePeak,
    PointFacts,
    ScopeDevice,
    ScopeFacts,
)
from memlog.sink import Axis

_MOST = 240
"""Maximum number of intervals. If there are more, every two neighbours become one interval."""
_SHOWN = 120
"""Maximum number of values that `History.values` returns."""


class History:
    """Highest value of each interval of a series; all intervals have the same length."""

    def __init__(self) -> None:
        self._length = 1
        self._highest: list[int] = []
        self._in_last = 0

    def add(self, value: int) -> None:
        if self._highest and self._in_last < self._length:
            self._highest[-1] = max(self._highest[-1], value)
            self._in_last += 1
            return
        if len(self._highest) >= _MOST:
            # All intervals are complete, and their number is even.
            self._highest = highest_of(self._highest, _MOST // 2)
            self._length *= 2
        self._highest.append(value)
        self._in_last = 1

    def values(self) -> list[int]:
        """Return at most `_SHOWN` values, in order."""
        return highest_of(self._highest, _SHOWN)


def highest_of(values: list[int], count: int) -> list[int]:
    """Split values into ``count`` equal parts and return the highest value of each part.

    If there are at most ``count`` values, return all values.
    """
    if len(values) <= count:
        return list(values)
    edges = [round(at * len(values) / count) for at in range(count + 1)]
    return [max(values[first:last]) for first, last in pairwise(edges)]


class MetricFold:
    """First index, last index, last value, minimum and maximum of every metric.

    An index is the number of a step, an evaluation or an epoch.
    """

    def __init__(self) -> None:
        self._series: dict[str, _Series] = {}

    def take(
        self, event: Event, *, older: bool = False, found: list[Reading] | None = None
    ) -> None:
        """Add the metrics of one event. An event without a step, evaluation or epoch has no metrics.

        If ``older`` is True, use an older memlog's names of metrics (see `memlog.metrics.values`). ``found``
        are the event's readings, if known.
        """
        on_axis = axis_and_index(event)
        if on_axis is None:
            return
        axis, index = on_axis
        for name, value, _ in values(event, older=older, found=found):
            if value is None:
                continue
            series = self._series.get(name)
            if series is None:
                self._series[name] = _Series(axis, value, index, event.time_us)
            else:
                series.take(value, index, event.time_us)

    def summary(self) -> dict[str, MetricSummary]:
        return {name: series.summary() for name, series in sorted(self._series.items())}


class _Series:
    __slots__ = ("_axis", "_first", "_last", "_latest", "_max", "_min")

    def __init__(self, axis: Axis, value: float, index: int, time_us: int) -> None:
        self._axis = axis
        self._first = index
        self._latest = (index, time_us)
        self._last = self._min = self._max = value

    def take(self, value: float, index: int, time_us: int) -> None:
        # Several processes can publish the same metric, and their journals are read one after the other.
        if (index, time_us) >= self._latest:
            self._latest = (index, time_us)
            self._last = value
        elif index < self._first:
            self._first = index
        if value < self._min:
            self._min = value
        elif value > self._max:
            self._max = value

    def summary(self) -> MetricSummary:
        return MetricSummary(
            axis=self._axis,
            first_index=self._first,
            last_index=self._latest[0],
            last=float(self._last),
            min=float(self._min),
            max=float(self._max),
        )


MAX_LABELS = 200
"""Maximum number of labels of each kind; the first ones are kept."""


class LabelFold:
    """Number of blocks and points, and their last and largest values, by label."""

    def __init__(self) -> None:
        self.omitted_scopes = self.omitted_points = 0
        """Numbers of blocks and of points whose labels are beyond the first `MAX_LABELS`."""
        self._scopes: dict[str, _Scopes] = {}
        self._points: dict[str, _Points] = {}

    def take_scope(self, event: Scope) -> None:
        if event.label not in self._scopes and len(self._scopes) >= MAX_LABELS:
            self.omitted_scopes += 1
        else:
            self._scopes.setdefault(event.label, _Scopes()).take(event)

    def take_point(self, event: Recorded) -> None:
        if event.label not in self._points and len(self._points) >= MAX_LABELS:
            self.omitted_points += 1
        else:
            self._points.setdefault(event.label, _Points()).take(event)

    def scopes(self) -> dict[str, ScopeFacts]:
        """Return the blocks by label, in the order in which the labels first appeared."""
        return {label: scopes.facts() for label, scopes in self._scopes.items()}

    def points(self) -> dict[str, PointFacts]:
        """Return the points by label, in the order in which the labels first appeared."""
        return {label: points.facts() for label, points in self._points.items()}


class _Levels:
    def __init__(self) -> None:
        self.last: int | None = None
        self.largest: int | None = None

    def take(self, size: int | None) -> None:
        if size is not None:
            self.last = size
            self.largest = size if self.largest is None else max(size, self.largest)

    def levels(self) -> Levels:
        return Levels(last_bytes=self.last, largest_bytes=self.largest)


class _Device:
    def __init__(self) -> None:
        self.change = _Levels()
        self.peak: int | None = None
        self.source: PeakSource | None = None

    def take(self, reading: Reading) -> None:
        self.change.take(reading.level)
        if reading.peak is not None and (self.peak is None or reading.peak > self.peak):
            self.peak, self.source = reading.peak, reading.source


class _Scopes:
    def __init__(self) -> None:
        self._count = self._errors = self._duration_us = 0
        self._rss = _Levels()
        self._devices: dict[str, _Device] = {}

    def take(self, event: Scope) -> None:
        self._count += 1
        self._errors += event.error is not None
        self._duration_us += event.duration_us
        host, *devices = changes(event)
        self._rss.take(host.level)
        for reading in devices:
            self._devices.setdefault(reading.owner, _Device()).take(reading)

    def facts(self) -> ScopeFacts:
        return ScopeFacts(
            count=self._count,
            errors=self._errors,
            duration_s=self._duration_us / 1e6,
            rss_change=self._rss.levels(),
            devices={
                name: ScopeDevice(
                    allocated_change=device.change.levels(),
                    peak_bytes=device.peak,
                    peak_source=device.source,
                )
                for name, device in self._devices.items()
            },
        )


class _Points:
    def __init__(self) -> None:
        self._count = 0
        self._rss = _Levels()
        self._allocated: dict[str, _Levels] = {}

    def take(self, event: Recorded) -> None:
        self._count += 1
        host, *devices = main_readings(event)
        self._rss.take(host.level)
        for reading in devices:
            self._allocated.setdefault(reading.owner, _Levels()).take(reading.level)

    def facts(self) -> PointFacts:
        return PointFacts(
            count=self._count,
            rss=self._rss.levels(),
            allocated={name: levels.levels() for name, levels in self._allocated.items()},
        )


class PhaseFold:
    """Counts, durations and peaks by label."""

    def __init__(self) -> None:
        self.omitted = 0
        """Number of phases whose labels are beyond the first `MAX_LABELS`."""
        self._by_label: dict[str, _Phases] = {}
        self._makers: dict[str, _Maker] = {}

    def take(self, event: Phase) -> None:
        """Add a phase that has ended. Nested phases are added before the phase that contains them."""
        if event.label not in self._by_label and len(self._by_label) >= MAX_LABELS:
            self.omitted += 1
            return
        self._by_label.setdefault(event.label, _Phases()).take(event)
        for reading in main_readings(event):
            if reading.peak is not None and reading.source == "exact":
                # A phase that contains this one can have the same peak. It comes later and is less
                # deep, so it does not replace this one.
                made = _Maker(reading.peak, len(event.within), event.label)
                known = self._makers.get(reading.owner)
                if known is None or made[:2] > known[:2]:
                    self._makers[reading.owner] = made

    def facts(self, peaks: Mapping[str, Peak]) -> dict[str, PhaseFacts]:
        """Return the facts about each label's phases, by label.

        Each label is followed by the labels nested in it. Otherwise, labels are in the order in which their
        first phases ended. ``peaks`` are the run's peaks.
        """
        made = {
            name: maker.label
            for name, maker in self._makers.items()
            if maker.size >= (peaks.get(peak_kind(name), UNKNOWN).bytes or 0)
        }
        order = {label: index for index, label in enumerate(self._by_label)}
        path = {
            label: [order.get(part, 0) for part in (*phases.within, label)]
            for label, phases in self._by_label.items()
        }
        # The path of a label begins with the path of the label around it, so it comes right after
        # that one.
        return {
            label: self._by_label[label].facts(label, made)
            for label in sorted(self._by_label, key=path.__getitem__)
        }


class _Maker(NamedTuple):
    """Innermost phase with the highest exact peak of one kind of memory."""

    size: int
    depth: int
    label: str


class _Phases:
    def __init__(self) -> None:
        self._count = self._errors = self._duration_us = 0
        self.within: tuple[str, ...] = ()
        self._exact: dict[str, tuple[int, int | None]] = {}
        self._read: dict[str, int] = {}

    def take(self, event: Phase) -> None:
        self._count += 1
        self._errors += event.error is not None
        self._duration_us += event.duration_us
        self.within = event.within
        for reading in main_readings(event):
            name, peak = reading.owner, reading.peak
            self._read[name] = max(event.highest.get(name, 0), self._read.get(name, 0))
            known = self._exact.get(name)
            if (
                reading.source == "exact"
                and peak is not None
                and (known is None or peak > known[0])
            ):
                self._exact[name] = (peak, event.step)

    def facts(self, label: str, made: Mapping[str, str]) -> PhaseFacts:
        return PhaseFacts(
            count=self._count,
            errors=self._errors,
            duration_s=self._duration_us / 1e6,
            within=list(self.within),
            peaks={
                name: PhasePeak(
                    exact_bytes=self._exact[name][0] if name in self._exact else None,
                    exact_step=self._exact[name][1] if name in self._exact else None,
                    at_least_bytes=max(read, self._exact.get(name, (0, None))[0]) or None,
                    made_the_peak=made.get(name) == label,
                )
                for name, read in self._read.items()
            },
        )


def known_peak(peak: PhasePeak) -> str:
    """Return the highest peak of a label's phases as text, with "at least" if it is only a lower bound."""
    size = format_bytes(peak.at_least_bytes)
    return size if peak.exact_bytes == peak.at_least_bytes else f"at least {size}"


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
        # A process numbers its events without gaps. So a gap is a number of missing events.
        self._missing[process] += max(entry.seq - self._next.get(process, 0), 0)
        self._next[process] = max(entry.seq + 1, self._next.get(process, 0))
        event = entry.event
        event_readings = list(readings(event))
        self.metrics.take(event, older=self._has_older_names, found=event_readings)
        self.facts.take_entry(entry, event_readings)
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
            parameters = parameters_of(event)
            self.parameters |= parameters.values if parameters else {}
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
        # The processes' journals are read one after the other, so this event can be older.
        elif earlier is None or earlier.time_us <= event.time_us:
            self._artifacts[event.name] = event

    def _list(self, event: Alert) -> None:
        if len(self.alerts) < MAX_LISTED:
            self.alerts.append(event)
        else:
            self.omitted["alerts"] += 1

"""Conversion of a journal's events to a tracker's points. All metric names are defined here.

Trackers group metrics by the part of the name before the last ``/``, and sort the groups alphabetically. The
names are chosen so that memory comes first and all layers are in one group.

If an older memlog wrote the journal, that version's names are used. So the values continue the series that
the older memlog has already sent to the tracker.

A tracker's points are a pure function of the journal. Steps are grouped into buckets whose width depends
only on the step's number, never on a clock or a backlog. Every point carries its event's own time. So a
replay of the journal yields the same points.
"""

from __future__ import annotations

import functools
import hashlib
import re
from collections.abc import Iterable, Iterator
from typing import Generic, NamedTuple, TypeVar

import msgspec

from memlog._internal.terminal import MIB, mib
from memlog.events import (
    HOST_ANON,
    HOST_PINNED,
    SAMPLED,
    SHARED,
    Alert,
    Artifact,
    Batch,
    DeviceReading,
    Epoch,
    Evaluation,
    Event,
    Health,
    Loss,
    Origin,
    OutOfMemory,
    Parameters,
    Phase,
    PinnedMemory,
    Ranks,
    Reading,
    Recorded,
    Sample,
    Scope,
    ThreadStep,
    Trace,
    changes,
    main_readings,
    readings,
)
from memlog.sink import STEP_PREFIX, Axis, Fold, Point, Resolution

_ON_STEPS = (
    Batch,
    Loss,
    Sample,
    PinnedMemory,
    Health,
    Alert,
    Trace,
    Scope,
    Recorded,
    Phase,
    Ranks,
)
_STEP_IN_TEXT = re.compile(r"\bsteps? [0-9]")


def axis_and_index(event: Event) -> tuple[Axis, int] | None:
    """Return the event's axis and its index on that axis; ``None`` if the event lies on no axis."""
    if isinstance(event, _ON_STEPS) and event.step is not None:
        return "step", event.step
    if isinstance(event, (Evaluation, Alert)) and event.evaluation is not None:
        return "evaluation", event.evaluation
    if isinstance(event, (Epoch, Alert)) and event.epoch is not None:
        return "epoch", event.epoch
    return None


def is_content(event: Event) -> bool:
    """Return True for an event on an axis, an alert, a failed allocation, or a file of the user's.

    A tracker's run with none of them has nothing to show.
    """
    if isinstance(event, Artifact):
        return not event.is_report
    return isinstance(event, (Alert, OutOfMemory)) or axis_and_index(event) is not None


def in_run(event: Event, offset: int) -> Event | None:
    """Return an event with the step number of a tracker's run instead of the session's.

    ``offset`` is the session's step minus the run's step (`memlog.journal.Binding.offset`). Before the run's
    first step, the result is ``None`` for a batch or a loss. A phase gets step 0. Other events get no step.
    """
    step = getattr(event, "step", None)
    if not offset or step is None:
        return event
    if isinstance(event, Alert):
        return alert_in_run(event, offset)
    own = step - offset
    if own >= 0 or isinstance(event, Phase):
        return msgspec.structs.replace(event, step=max(own, 0))
    return None if isinstance(event, (Batch, Loss)) else msgspec.structs.replace(event, step=None)


def alert_in_run(alert: Alert, offset: int) -> Alert:
    """Return an alert with the step number of a tracker's run. The arguments are those of `in_run`.

    Steps in the title and in the text keep the session's numbers. If the title or the text names a step, a
    remark at the end of the text explains the numbers.
    """
    if not offset:
        return alert
    step = None if alert.step is None or alert.step < offset else alert.step - offset
    text = alert.text
    if _STEP_IN_TEXT.search(f"{alert.title} {text}"):
        how = f"subtract {offset:,}" if offset > 0 else f"add {-offset:,}"
        text += f" (Steps in this text are the session's: {how} to get this run's step.)"
    return msgspec.structs.replace(alert, step=step, text=text.strip())


_ALERTS: dict[str, str] = {
    "step": "memory/step/alert",
    "evaluation": "memory/eval/alert",
    "epoch": "memory/epoch/alert",
}
"""Metric name of an alert, by the alert's axis. The names differ, because a metric can have one axis only."""
_OLDER = {"memory/step/alert": "memlog/alert", "memory/step/loss": "memlog/loss"}
"""Renamed metrics: the present name, and the name in journals of an older memlog."""
_ONLY_LOCAL = (HOST_ANON, SHARED)
"""Kinds of memory of which trackers get no metric. They serve the search for growth."""
_OUTSIDE = "(outside modules)"
_MAX_LABEL = 80
"""Maximum characters of a label in a metric's name. A longer label is cut."""
_UNSAFE_IN_LABEL = re.compile(r"[^A-Za-z0-9_.\-]+")


class Value(NamedTuple):
    """Value of one metric in one event."""

    name: str
    value: float | None
    fold: Fold


def values(
    event: Event, *, older: bool = False, found: Iterable[Reading] | None = None
) -> Iterable[Value]:
    """Return the metrics of one event. A value is ``None`` if it is unknown.

    With ``older``, an older memlog's names are used (`memlog.journal.Header.has_older_names`). ``found`` are
    the event's readings, if known.
    """
    if isinstance(event, Batch):  # most events; its metrics have the same names in each version
        return _memory("memory", readings(event) if found is None else found)
    return _values_of(event, older=older)


def _values_of(event: Event, *, older: bool) -> Iterator[Value]:
    if not older:
        yield from _values(event)
    elif isinstance(event, Trace):
        yield from _trace(event)
        yield from _older_layers(event)
    else:
        for value in _values(event):
            yield value._replace(name=_OLDER.get(value.name, value.name))


def sent_values(event: Event, *, older: bool = False) -> Iterator[Value]:
    """Yield those metrics of one event that trackers get. The arguments are those of `values`.

    From a health event, trackers get only two counts: of lost data, and of memlog's own errors. A count of 0
    is left out. The journal has all figures of the event. At the end of the run, trackers get these figures
    as parameters (`parameters_of`).
    """
    if older or not isinstance(event, Health):
        yield from values(event, older=older)
    else:
        yield from (value for value in _counts(event) if value.value)


def parameters_of(event: Event) -> Parameters | None:
    """Return the run's parameters that an event contains; ``None`` if the event contains none."""
    if isinstance(event, Parameters):
        return event
    if isinstance(event, Origin):
        known = msgspec.structs.asdict(event)
        time_us = known.pop("time_us")
        return Parameters(
            time_us, {name: str(value) for name, value in known.items() if value is not None}
        )
    return _closing_parameters(event)


def _closing_parameters(event: Event) -> Parameters | None:
    """Return memlog's own cost and errors, if the event is the trainer's last health event; else ``None``."""
    if not isinstance(event, Health) or event.steps is None:
        return None
    figures = {value.name.removeprefix("memlog/"): f"{value.value:g}" for value in _counts(event)}
    if event.steps > 0:
        figures["overhead_ms"] = f"{event.overhead_total_ms / event.steps:.3g}"
    return Parameters(event.time_us, figures)


def _values(event: Event) -> Iterator[Value]:
    if isinstance(event, Epoch):
        yield from _memory("memory/epoch", readings(event))
    elif isinstance(event, Evaluation):
        yield from _memory("memory/eval", readings(event))
        yield Value("memory/eval/loss", event.value, "last")
        yield Value("memory/eval/iteration", event.iteration, "last")
    elif isinstance(event, Loss):
        yield Value("memory/step/loss", event.value, "last")
    elif isinstance(event, Sample):
        yield from _levels("memory", readings(event))
    else:
        yield from _others(event)


def _others(event: Event) -> Iterator[Value]:
    """Yield the metrics of the event types that `_values` does not handle."""
    if isinstance(event, Alert):
        on_axis = axis_and_index(event)
        yield Value(_ALERTS[on_axis[0] if on_axis else "step"], 1.0, "max")
    elif isinstance(event, Scope):
        yield from _scope(event)
    elif isinstance(event, Recorded):
        yield from _point(event)
    elif isinstance(event, PinnedMemory):
        yield from _levels("memory", readings(event))
    elif isinstance(event, Ranks):
        yield from _ranks(event)
    elif isinstance(event, Phase):
        yield from _phase(event)
    elif isinstance(event, Trace):
        yield from _trace(event)
        yield from _layers(event)
    elif isinstance(event, Health):
        yield Value("memlog/overhead_ms", event.overhead_ms, "max")
        yield from _counts(event)


def _counts(event: Health) -> Iterator[Value]:
    yield Value("memlog/dropped", sum(event.dropped.values()), "last")
    yield Value("memlog/faults", sum(event.faults.values()), "last")


def _scope(event: Scope) -> Iterator[Value]:
    """Yield the changes of memory in a watched block, and the peak on each device.

    If a step has several blocks of the same label, the largest value of each metric is kept.
    """
    at = f"memory/scope/{safe_label(event.label)}"
    for each in changes(event):
        names = _names(at, each.name)
        yield Value(names.change, mib(each.level), "max")
        yield Value(names.peak, mib(each.peak), "max")


def _point(event: Recorded) -> Iterator[Value]:
    yield from _levels(f"memory/point/{safe_label(event.label)}", readings(event))


def _ranks(event: Ranks) -> Iterator[Value]:
    yield Value("memory/ranks/reporting", event.reporting, "last")
    for spread in event.spreads:
        # "last" for all metrics, so that a rank's number and its memory belong to the same step.
        at = f"memory/ranks/{spread.name}"
        yield Value(f"{at}_min_mib", mib(spread.smallest), "last")
        yield Value(f"{at}_min_rank", spread.smallest_rank, "last")
        yield Value(f"{at}_mean_mib", spread.mean / MIB, "last")
        yield Value(f"{at}_max_mib", mib(spread.largest), "last")
        yield Value(f"{at}_max_rank", spread.largest_rank, "last")
        if spread.mean:
            yield Value(f"{at}_imbalance", spread.largest / spread.mean - 1, "last")


def _phase(event: Phase) -> Iterator[Value]:
    """Yield the memory in use at a phase's end, and the peaks that were certainly reached in the phase."""
    at = f"memory/phase/{safe_label(event.label)}"
    found = main_readings(event)
    yield from _levels(at, found)
    for each in found:
        if each.source == "exact":
            yield Value(_names(at, each.name).peak, mib(each.peak), "max")


def safe_label(label: str) -> str:
    """Return a user's label as one part of a metric's name: ``loading dataset`` becomes ``loading_dataset``.

    If the label is too long, or has unsafe characters other than spaces, append a short digest of the label.
    So two such labels do not become one metric.
    """
    plain = label.strip().replace(" ", "_")
    cleaned = _UNSAFE_IN_LABEL.sub("_", plain)[:_MAX_LABEL]
    if cleaned == plain and cleaned.strip("."):
        return cleaned
    digest = hashlib.blake2s(label.encode("utf-8", "surrogatepass"), digest_size=3).hexdigest()
    return f"{cleaned.strip('_.') or 'label'}-{digest}"


def _trace(event: Trace) -> Iterator[Value]:
    """Yield the traced step's peak, and the bytes of each category at that peak."""
    yield Value("memory/trace/peak_mib", mib(event.peak), "max")
    for category, size in event.at_peak.items():
        yield Value(f"memory/trace/{category.replace(' ', '_')}_mib", mib(size), "max")


def _layers(event: Trace) -> Iterator[Value]:
    """Yield two figures of each layer, in bytes.

    They are the memory that the layer holds at the step's peak, and the largest rise of the memory in use
    during the layer's work.

    A metric's name has a dot between the layer's path and the figure. If there were a ``/``, trackers would
    show each layer as a group of its own.
    """
    for layer in event.layers:
        if layer.in_series:
            name = f"memory/layers/{_OUTSIDE.strip('()') if layer.path == _OUTSIDE else layer.path}"
            yield Value(f"{name}.at_peak_mib", mib(layer.at_peak), "max")
            yield Value(f"{name}.peak_mib", mib(layer.added), "max")


def _older_layers(event: Trace) -> Iterator[Value]:
    for layer in event.layers:
        yield Value(f"memory/layers/{layer.path}/at_peak_mib", mib(layer.at_peak), "max")
        yield Value(f"memory/layers/{layer.path}/peak_mib", mib(layer.peak), "max")


def _memory(at: str, found: Iterable[Reading]) -> Iterator[Value]:
    for each in found:
        if each.name not in _ONLY_LOCAL:
            names = _names(at, each.name)
            yield Value(names.level, mib(each.level), "last")
            if names.peak:
                yield Value(names.peak, mib(each.peak), "max")
                if each.device is not None:
                    yield from _of_allocator(names.owner, each.device)


def _levels(at: str, found: Iterable[Reading]) -> Iterator[Value]:
    for each in found:
        names = _names(at, each.name)
        yield Value(names.level, mib(each.level), names.worst)
        if each.name == HOST_PINNED:
            yield Value(names.peak, mib(each.peak), "max")


def _of_allocator(at: str, device: DeviceReading) -> Iterator[Value]:
    yield Value(f"{at}/fragmentation", fragmentation(device), "last")
    # Most runs have none of these: then there is no series.
    yield Value(f"{at}/private_pools_mib", mib(device.private_pools or None), "last")
    yield Value(f"{at}/retries", device.retries or None, "last")
    yield Value(f"{at}/ooms", device.ooms or None, "last")


class _Names(NamedTuple):
    """Names of the metrics of one kind of memory."""

    owner: str
    """Beginning of the names of all metrics of the owner."""
    level: str
    change: str
    peak: str
    """Empty unless the kind is the main one of its owner."""
    worst: Fold
    """Fold that keeps the worst of several levels."""


@functools.lru_cache(4_096)  # so that the names are not made again for each event
def _names(at: str, kind: str) -> _Names:
    """Return the names for a kind of memory, such as ``cuda0.allocated``, under the prefix ``at``."""
    owner, _, what = kind.partition(".")
    under = f"{at}/{owner}"
    peak = {"rss": "rss_peak_mib", "allocated": "peak_mib", "pinned": "pinned_peak_mib"}.get(what)
    return _Names(
        under,
        f"{under}/{what}_mib",
        f"{under}/{what}_change_mib",
        f"{under}/{peak}" if peak else "",
        "min" if kind in SAMPLED and SAMPLED[kind].is_worst_low else "max",
    )


def fragmentation(device: DeviceReading) -> float | None:
    """Return inactive split bytes / reserved bytes, from 0 to 1; ``None`` if unknown or nothing is reserved.

    ``(reserved - allocated) / reserved`` is no measure of fragmentation: it is near 1 after every healthy
    epoch, when the cache is full and nothing is in use.
    """
    if device.inactive_split is None or not device.reserved:
        return None
    return device.inactive_split / device.reserved


PositionT = TypeVar("PositionT")


def bucket_start(offset: int) -> int:
    """Return the first index of the bucket that contains ``offset``, an index counted from the axis's start.

    Below index 10,000, every index is a bucket of its own. From index 10,000, a bucket has ten indices; from
    100,000, a hundred; and so on. So a run of a million steps has 28,000 points per metric. For a peak, a
    bucket keeps the largest value, so a chart shows every peak.
    """
    width = 1
    while offset >= 10_000 * width:
        width *= 10
    return offset - offset % width


class Plan(Generic[PositionT]):
    """Conversion of one process's events, in order, to points.

    Args:
        resolution: ``"bucketed"`` groups steps, ``"full"`` gives every index its own points.
        initial_step: First step of the step axis. Buckets of steps begin there.
        older: True to use an older memlog's names of metrics.
        offset: The session's step minus the run's step.
    """

    def __init__(
        self,
        resolution: Resolution,
        initial_step: int = 0,
        *,
        older: bool = False,
        offset: int = 0,
    ) -> None:
        self._bucketed = resolution == "bucketed"
        self._older = older
        self._offset = offset
        self._origins: dict[Axis, int] = {"step": initial_step, "evaluation": 0, "epoch": 0}
        self._buckets: dict[Axis, _Bucket[PositionT]] = {}

    def feed(self, event: Event, position: PositionT) -> list[Point]:
        """Add the journal's next event, which is at ``position``. Return the points that are now final."""
        counted = in_run(event, self._offset)
        on_axis = None if counted is None else axis_and_index(counted)
        if on_axis is None:
            return []
        axis, index = on_axis
        start = self._start(axis, index)
        bucket = self._buckets.get(axis)
        if bucket is not None and start < bucket.start:
            return _Bucket(axis, start, position, self._older).add(event, index).points()
        done: list[Point] = []
        if bucket is None or start > bucket.start:
            done = bucket.points() if bucket else []
            bucket = self._buckets[axis] = _Bucket(axis, start, position, self._older)
        bucket.add(event, index)
        return done

    def flush(self) -> list[Point]:
        """Return the points of the buckets that are still open, for example at the end of the journal."""
        done = [point for bucket in self._buckets.values() for point in bucket.points()]
        self._buckets.clear()
        return done

    @property
    def open_since(self) -> dict[Axis, PositionT]:
        """Position of the first event in each axis's open bucket. The points of an open bucket are not final.

        To get the final points, begin at this position and pass the axis's events to `feed` of a new plan.
        """
        return {axis: bucket.position for axis, bucket in self._buckets.items()}

    def _start(self, axis: Axis, index: int) -> int:
        origin = self._origins[axis]
        if not self._bucketed or index < origin:
            return index
        return origin + bucket_start(index - origin)


class _Bucket(Generic[PositionT]):
    """Points of one bucket: one point for each metric."""

    def __init__(self, axis: Axis, start: int, position: PositionT, older: bool) -> None:
        self._older = older
        self.axis = axis
        self.start = start
        self.position = position
        self._points: dict[str, Point] = {}

    def add(self, event: Event, index: int) -> _Bucket[PositionT]:
        for name, value, fold in sent_values(event, older=self._older):
            if value is None:
                continue
            held = self._points.get(name)
            if held is None or replaces(fold, value, held.value):
                self._points[name] = Point(name, value, self.axis, index, event.time_us, fold)
        return self

    def points(self) -> list[Point]:
        return list(self._points.values())


def thread_point(event: ThreadStep) -> Point:
    """Return the point of a step in another thread's run (`memlog.events.ThreadStep`)."""
    return Point(f"{STEP_PREFIX}rss_mib", event.rss / MIB, "step", event.step, event.time_us)


def replaces(fold: Fold, new: float, held: float) -> bool:
    """Return True if the newer of two values of a metric replaces the older one.

    ``fold`` names the value that a bucket keeps: ``max``, ``min`` or ``last``.
    """
    if fold == "last":
        return True
    return new > held if fold == "max" else new < held

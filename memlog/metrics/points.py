"""Conversion of a journal's events to a tracker's points: which values are sent, and at which indices.

A tracker's points are a pure function of the journal. Steps are grouped into buckets whose width depends
only on the step's number, never on a clock or a backlog. Every point carries its event's own time. So a
replay of the journal yields the same points.
"""

from __future__ import annotations

from typing import Generic, TypeVar

from memlog._internal.terminal import MIB
from memlog.events import Event, ThreadStep
from memlog.metrics.event_values import axis_and_index, in_run, sent_values
from memlog.sink import STEP_PREFIX, Axis, Fold, Point, Resolution

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

"""A sink whose calls fail where a test wants them to."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TypeVar

from memlog.errors import TrackerUnavailableError
from memlog.events import Alert, Artifact, Status
from memlog.sink import Point, Sink, TrackerRun

_T = TypeVar("_T")


class Fault:
    """Fails one call of many, across all sinks that share it.

    Args:
        at: Which one, from 0.
        answered: The call is done, and only its answer is lost.
    """

    def __init__(self, at: int, *, answered: bool) -> None:
        self._left = at
        self._answered = answered
        self.happened = False

    def call(self, do: Callable[[], _T]) -> _T:
        """Does what a call does, or fails."""
        self._left -= 1
        if self._left != -1:
            return do()
        self.happened = True
        if self._answered:
            do()
        raise TrackerUnavailableError("the connection broke: a test made it")


class InterruptedSink:
    """Passes every call on to a sink, unless its `Fault` is due."""

    def __init__(self, sink: Sink, fault: Fault) -> None:
        self._sink = sink
        self._fault = fault
        self.durable = sink.durable
        self.resolution = sink.resolution
        self.dropped: Mapping[str, int] = sink.dropped
        self.max_points = min(sink.max_points, 50)

    def probe(self) -> None:
        """See `memlog.sink.Sink`."""
        self._fault.call(self._sink.probe)

    def open(self) -> TrackerRun:
        """See `memlog.sink.Sink`."""
        return self._fault.call(self._sink.open)

    def log_points(self, points: Sequence[Point]) -> None:
        """See `memlog.sink.Sink`."""
        self._fault.call(lambda: self._sink.log_points(points))

    def log_parameters(self, parameters: Mapping[str, str]) -> None:
        """See `memlog.sink.Sink`."""
        self._fault.call(lambda: self._sink.log_parameters(parameters))

    def log_alerts(self, alerts: Sequence[Alert], first_new: int) -> None:
        """See `memlog.sink.Sink`."""
        self._fault.call(lambda: self._sink.log_alerts(alerts, first_new))

    def log_artifact(self, artifact: Artifact, file: Path) -> None:
        """See `memlog.sink.Sink`."""
        self._fault.call(lambda: self._sink.log_artifact(artifact, file))

    def close(self, status: Status | None, ended_us: int | None = None) -> None:
        """See `memlog.sink.Sink`."""
        self._fault.call(lambda: self._sink.close(status, ended_us))

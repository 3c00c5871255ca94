"""A sink whose calls fail where a test wants them to."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TypeVar

from memlog.errors import TrackerRejectedError, TrackerUnavailableError
from memlog.events import Alert, Artifact, Status
from memlog.sink import Point, Sink, TrackerRun

_T = TypeVar("_T")


class OddError(Exception):
    """What nobody expects of a tracker's client."""


def unavailable() -> Exception:
    """Trying again helps."""
    return TrackerUnavailableError("the connection broke: a test made it")


def refused() -> Exception:
    """Trying again does not help, although here it would."""
    return TrackerRejectedError("the tracker said no: a test made it")


def odd() -> Exception:
    """An error of the client's own making, with a password in its text."""
    return OddError("connection to http://user:secret@host is in a state")


class Fault:
    """Fails one call of many, across all sinks that share it.

    Args:
        at: Which one, from 0; -1: none.
        answered: The call is done, and only its answer is lost.
        error: Makes what the call raises.

    Attributes:
        struck: The method whose call failed; ``None`` so far.
        points: Those that it was to take.
        refuses: Whether it fails with a refusal, after which nobody tries again.
    """

    def __init__(
        self, at: int, *, answered: bool = False, error: Callable[[], Exception] = unavailable
    ) -> None:
        self._left = at
        self._answered = answered
        self._error = error
        self.struck: str | None = None
        self.points: Sequence[Point] = ()
        self.refuses = error is refused

    def call(self, method: str, do: Callable[[], _T], points: Sequence[Point] = ()) -> _T:
        """Does what a call does, or fails."""
        self._left -= 1
        if self._left != -1:
            return do()
        self.struck, self.points = method, points
        if self._answered:
            do()
        raise self._error()


class InterruptedSink:
    """Passes every call on to a sink, unless its `Fault` is due."""

    def __init__(self, sink: Sink, fault: Fault) -> None:
        self._sink = sink
        self._fault = fault
        self.durable = sink.durable
        self.resolution = sink.resolution
        self.max_points = min(sink.max_points, 50)
        self.dropped: Mapping[str, int] = sink.dropped

    def probe(self) -> None:
        """See `memlog.sink.Sink`."""
        self._call("probe", self._sink.probe)

    def open(self) -> TrackerRun:
        """See `memlog.sink.Sink`."""
        return self._call("open", self._sink.open)

    def log_points(self, points: Sequence[Point]) -> None:
        """See `memlog.sink.Sink`."""
        self._call("log_points", lambda: self._sink.log_points(points), points)

    def log_parameters(self, parameters: Mapping[str, str]) -> None:
        """See `memlog.sink.Sink`."""
        self._call("log_parameters", lambda: self._sink.log_parameters(parameters))

    def log_alerts(self, alerts: Sequence[Alert], first_new: int) -> None:
        """See `memlog.sink.Sink`."""
        self._call("log_alerts", lambda: self._sink.log_alerts(alerts, first_new))

    def log_artifact(self, artifact: Artifact, file: Path) -> None:
        """See `memlog.sink.Sink`."""
        self._call("log_artifact", lambda: self._sink.log_artifact(artifact, file))

    def close(self, status: Status | None, ended_us: int | None = None) -> None:
        """See `memlog.sink.Sink`."""
        self._call("close", lambda: self._sink.close(status, ended_us))

    def _call(self, method: str, do: Callable[[], _T], points: Sequence[Point] = ()) -> _T:
        try:
            return self._fault.call(method, do, points)
        finally:
            self.dropped = self._sink.dropped

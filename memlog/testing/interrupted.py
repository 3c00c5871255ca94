"""A sink whose calls fail at a point that a test chooses."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TypeVar

from memlog.errors import TrackerRejectedError, TrackerUnavailableError
from memlog.events import Alert, Artifact, Status
from memlog.sink import Point, Sink, TrackerRun

_T = TypeVar("_T")


class OddError(Exception):
    """Unexpected exception of a tracker's client."""


def unavailable() -> Exception:
    """Return an error after which a sink's caller tries again."""
    return TrackerUnavailableError("the connection broke: a test made it")


def refused() -> Exception:
    """Return an error after which a sink's caller does not try again."""
    return TrackerRejectedError("the tracker refused: a test made it")


def odd() -> Exception:
    """Return an unexpected error with a password in its text."""
    return OddError("connection to http://user:secret@host is in a state")


class Fault:
    """Failure of one call, counted across all sinks that share this object.

    Args:
        at: Number of the call that fails, from 0; -1: none.
        answered: ``True``: the call is done, and only its answer is lost.
        error: Creates the exception.

    Attributes:
        failed: Method whose call failed; ``None``: none so far.
        points: Points that the failed call was to store.
        refuses: True if the error is a refusal, after which the caller does not try again.
    """

    def __init__(
        self, at: int, *, answered: bool = False, error: Callable[[], Exception] = unavailable
    ) -> None:
        self._left = at
        self._answered = answered
        self._error = error
        self.failed: str | None = None
        self.points: Sequence[Point] = ()
        self.refuses = error is refused

    def call(self, method: str, do: Callable[[], _T], points: Sequence[Point] = ()) -> _T:
        """Execute a call, or fail."""
        self._left -= 1
        if self._left != -1:
            return do()
        self.failed, self.points = method, points
        if self._answered:
            do()
        raise self._error()


class InterruptedSink:
    """Sink that passes every call on to another sink, except the call that its `Fault` makes fail."""

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

"""A sink in which one call fails. The test chooses the call."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any, TypeVar

from memlog.errors import TrackerRejectedError, TrackerUnavailableError
from memlog.sink import Point, Sink

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
    """Failure of one call. Calls are counted across all sinks that share this object.

    ``at`` is the number of the call that fails, counted from 0; -1: no call fails. With ``answered``, the
    failing call is executed, and only its result is lost. After the failure, ``failed`` is the name of the
    method, and ``points`` holds the points that were passed to the failed call.
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
        """Execute a call, or raise if this call is the one that must fail."""
        self._left -= 1
        if self._left != -1:
            return do()
        self.failed, self.points = method, points
        if self._answered:
            do()
        raise self._error()


class InterruptedSink:
    """Sink that passes calls on to another sink. Its `Fault` makes one call fail."""

    def __init__(self, sink: Sink, fault: Fault) -> None:
        self._sink = sink
        self._fault = fault
        self.durable = sink.durable
        self.resolution = sink.resolution
        self.max_points = min(sink.max_points, 50)
        self.dropped: Mapping[str, int] = sink.dropped

    def __getattr__(self, method: str) -> Callable[..., Any]:
        def call(*arguments: Any) -> Any:
            points = arguments[0] if method == "log_points" else ()
            do = partial(getattr(self._sink, method), *arguments)
            try:
                return self._fault.call(method, do, points)
            finally:
                self.dropped = self._sink.dropped

        return call

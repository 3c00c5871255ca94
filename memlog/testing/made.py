"""Test data of the sink contract, and a sink in which one call fails."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

from memlog._internal.diagnostics import Diagnostics
from memlog.errors import TrackerRejectedError, TrackerUnavailableError
from memlog.events import (
    Alert,
    Artifact,
    Batch,
    End,
    Epoch,
    Evaluation,
    Event,
    Loss,
    Parameters,
    Run,
)
from memlog.journal import JournalWriter, RunDirectory, new_run
from memlog.journal.artifacts import keep
from memlog.metrics import Plan
from memlog.sink import Axis, Point, Sink

BEGUN_US = 1_795_000_000_000_000
ENDED_US = BEGUN_US + 10**9
FACTS = {"torch": "2.9", "device": "cuda0"}
CONTENT = b"content\x00\xff\n"
_STEPS = 30
_INDICES = (0, 1, 2, 999, 1_000, 1_001, 65_536, 10_000_000, 2**31)
_METRICS: dict[Axis, str] = {
    "step": "memory/host/rss_mib",
    "evaluation": "memory/eval/host/rss_mib",
    "epoch": "memory/epoch/host/rss_mib",
}


def points(count: int, first: int = 0) -> list[Point]:
    """Return points of one metric at ``count`` steps from ``first`` on, 1.5 ms apart."""
    return [_point("step", step, after=step) for step in range(first, first + count)]


def points_everywhere() -> list[Point]:
    """Return points of one metric per axis, at small and large indices, in order."""
    return [
        _point(axis, index, after=rank) for axis in _METRICS for rank, index in enumerate(_INDICES)
    ]


def _point(axis: Axis, index: int, after: int) -> Point:
    return Point(_METRICS[axis], 100.5 + after, axis, index, BEGUN_US + after * 1500)


def odd_points() -> list[Point]:
    """Return points with odd names, values and indices. Some trackers can't store all of them."""
    names = (
        "",
        " ",
        "a" * 1000,
        "ü/ß",
        "../../etc/passwd",
        "/etc/passwd",
        "a\nb\0c",
        "%s$(x)`;'\"",
    )
    values = (float("inf"), float("-inf"), float("nan"), 1e308, -0.0)
    return [
        *(Point(name, 1.0, "step", 0, BEGUN_US) for name in names),
        *(
            Point("memory/odd", value, "step", at, BEGUN_US + at * 1500)
            for at, value in enumerate(values)
        ),
        Point("memory/odd", 1.0, "step", 2**63 - 1, BEGUN_US),
        Point("memory/odd", 1.0, "step", -1, 0),
    ]


def alert(step: int) -> Alert:
    """Return an alert whose title names the step."""
    time_us = BEGUN_US + step * 1500
    return Alert(time_us, step, "warning", "host.rss > 1 GiB", f"at {step}", "text")


def file_in(folder: Path, content: bytes = CONTENT) -> tuple[Artifact, Path]:
    """Create a file. Return the journal's event about the file, and the file's path."""
    path = folder / "graph.svg"
    path.write_bytes(content)
    artifact = Artifact(BEGUN_US, path.name, "flamegraph", f"artifacts/{path.name}", len(content))
    return artifact, path


def recorded(root: Path) -> RunDirectory:
    """Record a failed run with everything that a tracker can get, in a folder of ``root``."""
    run = new_run(root)
    journal = JournalWriter(
        run.path, run=run.id, role="trainer", begun_us=BEGUN_US, diagnostics=Diagnostics()
    )
    (root / "source").write_bytes(CONTENT)
    artifact = keep(run, root / "source", "source", "file")
    for event in (*_events(), artifact, alert(3), End(ENDED_US, "failed")):
        journal.append(event)
    journal.close()
    return run


def _events() -> Sequence[Event]:
    made: list[Event] = [Run(BEGUN_US, None, None, (), {}), Parameters(BEGUN_US, FACTS)]
    for step in range(_STEPS):
        at = BEGUN_US + step * 1500
        made += [
            Batch(at, step, 2**30 + step * 2**20, 2**31, "watermark"),
            Loss(at + 10**5, step, 1 / (step + 1)),
        ]
    made += [Evaluation(BEGUN_US + call * 1500, call, 0.5, 2**30) for call in range(3)]
    made += [
        Epoch(BEGUN_US + epoch * 1500, epoch, None, 2**30, 2**31, "exact") for epoch in range(3)
    ]
    return made


def plan_of(run: RunDirectory) -> list[Point]:
    """Return the points of a run's journal."""
    made: list[Point] = []
    for file in run.files():
        plan: Plan[int] = Plan("full")
        for at, entry in enumerate(file.read()):
            made += plan.feed(entry.event, at)
        made += plan.flush()
    return made


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

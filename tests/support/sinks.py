"""A sink that keeps all data that it gets, and fails on demand."""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

from memlog.errors import RunRefusedError, TrackerRejectedError, TrackerUnavailableError
from memlog.events import Alert, Artifact, Status
from memlog.sink import Point, Resolution, Target, TrackerRun


@dataclass
class ListTracker:
    """A tracker in memory: points by run."""

    points: dict[str, list[Point]] = field(default_factory=dict)
    parameters: dict[str, dict[str, str]] = field(default_factory=dict)
    ended: dict[str, Status | None] = field(default_factory=dict)
    ended_us: dict[str, int | None] = field(default_factory=dict)
    down: bool = False
    bad: frozenset[str] = frozenset()
    crash_after: int | None = None
    opened: list[Target] = field(default_factory=list)
    durable: bool = True
    alerts: dict[str, list[Alert]] = field(default_factory=dict)
    files: dict[str, dict[tuple[str, str], bytes]] = field(default_factory=dict)
    refused_files: frozenset[str] = frozenset()
    deleted: set[str] = field(default_factory=set)
    """Ids of runs that can't be written to."""
    asked: list[str] = field(default_factory=list)
    """Ids of the runs that were requested, whether opened or refused, in order."""

    def open_sink(self, target: Target) -> "ListSink":
        self.opened.append(target)
        return ListSink(self, target)

    @contextmanager
    def outage(self) -> Iterator[None]:
        """Make every request fail during the block."""
        self.down = True
        try:
            yield
        finally:
            self.down = False

    def all_points(self) -> list[Point]:
        return [point for points in self.points.values() for point in points]


class ListSink:
    resolution: Resolution = "bucketed"
    max_points = 10

    def __init__(self, tracker: ListTracker, target: Target) -> None:
        self._tracker = tracker
        self._target = target
        self.durable = tracker.durable
        self.dropped: dict[str, int] = {}
        self._run = target.joined.run_id if target.joined else f"own-{target.own_id}"
        if target.beside:
            self._run = f"beside-{target.beside.run_id}"
        elif target.opened:
            self._run = target.opened.run_id
        elif not target.joined and self._run in tracker.deleted:
            self._run += "-anew"

    def probe(self) -> None:
        if self._tracker.down:
            raise TrackerUnavailableError("the tracker is down: start it")

    def _ask(self) -> None:
        self.probe()
        if self._run in self._tracker.deleted:
            raise RunRefusedError(f"the run {self._run} is deleted")

    def open(self) -> TrackerRun:
        self._tracker.asked.append(self._run)
        self._ask()
        self._tracker.points.setdefault(self._run, [])
        return TrackerRun(self._run, "memory://user:secret@host")

    def log_points(self, points: Sequence[Point]) -> None:
        assert len(points) <= self.max_points
        if self._run in self._tracker.deleted:
            raise RunRefusedError(f"the run {self._run} is deleted")
        if any(point.name in self._tracker.bad for point in points):
            raise TrackerRejectedError("a bad name")
        if self._tracker.crash_after is not None:
            self._tracker.crash_after -= 1
            if self._tracker.crash_after < 0:
                raise RuntimeError("a bug in the client, password in memory://user:secret@host")
        self._tracker.points[self._run] += points

    def log_parameters(self, parameters: Mapping[str, str]) -> None:
        self._ask()
        self._tracker.parameters.setdefault(self._run, {}).update(parameters)

    def log_alerts(self, alerts: Sequence[Alert], first_new: int) -> None:
        self._ask()
        assert 0 <= first_new < len(alerts)
        self._tracker.alerts.setdefault(self._run, []).extend(alerts[first_new:])

    def log_artifact(self, artifact: Artifact, file: Path) -> None:
        self._ask()
        if artifact.name in self._tracker.refused_files:
            raise TrackerRejectedError("a bad name")
        files = self._tracker.files.setdefault(self._run, {})
        files[artifact.kind, artifact.name] = file.read_bytes()

    def close(self, status: Status | None, ended_us: int | None = None) -> None:
        if status is not None and self._target.joined is None:
            self._ask()
        self._tracker.ended[self._run] = status
        self._tracker.ended_us[self._run] = ended_us

"""The contracts of sinks and stores, run for a tracker in memory."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from pathlib import Path

from memlog.errors import TrackerRejectedError, TrackerUnavailableError
from memlog.events import Alert, Status
from memlog.sink import ArtifactStore, Point, Sink, StoredArtifact, Target, TrackerRun
from memlog.testing import ArtifactStoreContract, Row, SinkContract, Time
from support.sinks import ListSink, ListTracker


class IdempotentSink(ListSink):
    """A `ListSink` that stores each point once, as a real sink does. `ListSink` itself also keeps copies."""

    max_points = 40

    def log_points(self, points: Sequence[Point]) -> None:
        self.probe()
        held = self._tracker.points.setdefault(self._run, [])
        super().log_points([point for point in points if point not in held])

    def log_alerts(self, alerts: Sequence[Alert], first_new: int) -> None:
        self.probe()
        assert 0 <= first_new < len(alerts)
        self._tracker.alerts[self._run] = list(alerts)

    def close(self, status: Status | None, ended_us: int | None = None) -> None:
        self.probe()
        if status is not None and self._run.startswith("own-"):
            super().close(status, ended_us)


class InMemory(SinkContract):
    sink: type[ListSink] = IdempotentSink
    tracker: ListTracker

    def open_sink(self, target: Target) -> Sink:
        return self.sink(self.tracker, target)

    def user_run(self) -> TrackerRun:
        self.tracker.points["users"] = []
        return TrackerRun("users")

    def rows(self, run_id: str) -> Sequence[Row]:
        return [(point.name, point.index, point.value) for point in self.tracker.points[run_id]]

    def times(self, run_id: str) -> Sequence[Time]:
        held = self.tracker.points[run_id]
        return [(point.name, point.index, point.time_us // 1000) for point in held]

    def parameters(self, run_id: str) -> Mapping[str, str]:
        return self.tracker.parameters.get(run_id, {})

    def alerts(self, run_id: str) -> Sequence[str]:
        return [alert.title for alert in self.tracker.alerts.get(run_id, [])]

    def files(self, run_id: str) -> Mapping[tuple[str, str], bytes]:
        return self.tracker.files.get(run_id, {})

    def status(self, run_id: str) -> Status | None:
        return self.tracker.ended.get(run_id)

    def ended_ms(self, run_id: str) -> int | None:
        ended = self.tracker.ended_us.get(run_id)
        return None if ended is None else ended // 1000

    def down(self) -> AbstractContextManager[None]:
        return self.tracker.outage()


class ListStore:
    def __init__(self, tracker: ListTracker) -> None:
        self.tracker = tracker

    def list_artifacts(self, run_id: str) -> list[StoredArtifact]:
        self._ask()
        if run_id not in self.tracker.points:
            raise TrackerRejectedError(f"there is no run {run_id}: look at its page for the id")
        files = self.tracker.files.get(run_id, {})
        return [StoredArtifact(name, kind, len(data)) for (kind, name), data in files.items()]

    def fetch(
        self,
        run_id: str,
        artifact: StoredArtifact,
        directory: Path,
        progress: Callable[[int], object],
    ) -> Path:
        self._ask()
        try:
            data = self.tracker.files[run_id][artifact.kind, artifact.name]
        except KeyError:
            raise TrackerRejectedError(f"there is no file {artifact.name!r}") from None
        (directory / artifact.name).write_bytes(data)
        progress(len(data))
        return directory / artifact.name

    def _ask(self) -> None:
        if self.tracker.down:
            raise TrackerUnavailableError("the tracker is down: start it")


class StoreInMemory(ArtifactStoreContract):
    store: type[ListStore] = ListStore
    tracker: ListTracker

    def open_store(self) -> ArtifactStore:
        return self.store(self.tracker)

    def run_with(self, files: Mapping[tuple[str, str], bytes]) -> str:
        run_id = f"own-{len(self.tracker.points)}"
        self.tracker.points[run_id] = []
        self.tracker.files[run_id] = dict(files)
        return run_id

    def unknown_run(self) -> str:
        return "nothing"

    def down(self) -> AbstractContextManager[None]:
        return self.tracker.outage()

"""The contracts hold for what tests use in a tracker's place, and find what breaks them."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path

import pytest
from support.sinks import ListSink, ListTracker

from memlog.errors import TrackerRejectedError, TrackerUnavailableError
from memlog.events import Artifact, Status
from memlog.sink import ArtifactStore, Point, Sink, StoredArtifact, Target, TrackerRun
from memlog.testing import ArtifactStoreContract, Row, SinkContract


class IdempotentSink(ListSink):
    """A `ListSink` keeps whatever it gets, so that tests see it; a real one stores a point once."""

    def log_points(self, points: Sequence[Point]) -> None:
        self.probe()
        held = self._tracker.points.setdefault(self._run, [])
        super().log_points([point for point in points if point not in held])

    def close(self, status: Status | None, ended_us: int | None = None) -> None:
        if status is not None and self._run.startswith("own-"):
            super().close(status, ended_us)


class TestTheSinkInMemory(SinkContract):
    @pytest.fixture(autouse=True)
    def _tracker(self) -> None:
        self.tracker = ListTracker()

    def open_sink(self, target: Target) -> Sink:
        return IdempotentSink(self.tracker, target)

    def user_run(self) -> TrackerRun:
        self.tracker.points["users"] = []
        return TrackerRun("users")

    def rows(self, run_id: str) -> Sequence[Row]:
        return [(point.name, point.index, point.value) for point in self.tracker.points[run_id]]

    def status(self, run_id: str) -> Status | None:
        return self.tracker.ended.get(run_id)

    @contextmanager
    def down(self) -> Iterator[None]:
        self.tracker.down = True
        yield
        self.tracker.down = False


class Doubling(TestTheSinkInMemory):
    __test__ = False

    def open_sink(self, target: Target) -> Sink:
        return ListSink(self.tracker, target)


class Losing(TestTheSinkInMemory):
    __test__ = False

    def open_sink(self, target: Target) -> Sink:
        class Losing(IdempotentSink):
            def log_points(self, points: Sequence[Point]) -> None:
                super().log_points(points[:-1])

        return Losing(self.tracker, target)


def fails(contract: TestTheSinkInMemory, test: Callable[[], None]) -> bool:
    contract.tracker = ListTracker()
    try:
        test()
    except AssertionError:
        return True
    return False


def test_a_sink_that_doubles_or_loses_is_found(tmp_path: Path) -> None:
    doubling, losing = Doubling(), Losing()
    assert fails(doubling, doubling.test_a_point_that_is_there_changes_nothing)
    assert fails(doubling, doubling.test_a_users_run_is_joined_or_ridden_and_never_ended)
    interrupted = doubling.test_a_failure_at_any_call_loses_nothing_and_doubles_nothing
    assert fails(doubling, lambda: interrupted(tmp_path))
    assert fails(losing, losing.test_points_arrive_as_they_are)


class ListStore:
    """Brings back what a `ListTracker` holds."""

    def __init__(self, tracker: ListTracker) -> None:
        self._tracker = tracker

    def list_artifacts(self, run_id: str) -> list[StoredArtifact]:
        self._ask()
        if run_id not in self._tracker.points:
            raise TrackerRejectedError(f"there is no run {run_id}: look at its page for the id")
        files = self._tracker.files.get(run_id, {})
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
            data = self._tracker.files[run_id][artifact.kind, artifact.name]
        except KeyError:
            raise TrackerRejectedError(f"there is no file {artifact.name!r}") from None
        (directory / artifact.name).write_bytes(data)
        progress(len(data))
        return directory / artifact.name

    def _ask(self) -> None:
        if self._tracker.down:
            raise TrackerUnavailableError("the tracker is down: start it")


class TestTheStoreInMemory(ArtifactStoreContract):
    @pytest.fixture(autouse=True)
    def _tracker(self, tmp_path_factory: pytest.TempPathFactory) -> None:
        self.tracker = ListTracker()
        self.folder = tmp_path_factory.mktemp("files")

    def open_store(self) -> ArtifactStore:
        return ListStore(self.tracker)

    def run_with(self, files: Mapping[tuple[str, str], bytes]) -> str:
        sink = ListSink(self.tracker, Target("mine", None))
        for (kind, name), data in files.items():
            (self.folder / name).write_bytes(data)
            artifact = Artifact(1, name, kind, f"artifacts/{name}", len(data))
            sink.log_artifact(artifact, self.folder / name)
        return sink.open().run_id

    def unknown_run(self) -> str:
        return "nothing"

    @contextmanager
    def down(self) -> Iterator[None]:
        self.tracker.down = True
        yield
        self.tracker.down = False

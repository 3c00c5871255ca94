"""MLflow's sink and store keep the contracts of all integrations. Each test has its own database."""

from __future__ import annotations

import json
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from pathlib import Path

import pytest
from mlflow import MlflowClient
from mlflow.entities import Metric
from support.mlflow_server import environment_without_mlflow, sqlite_store
from support.stores import moved_away, run_with_files

from memlog.events import Status
from memlog.sink import ArtifactStore, Connection, Sink, Target, TrackerRun
from memlog.testing import ArtifactStoreContract, Row, SinkContract, Time
from memlog_mlflow import backend

pytestmark = [
    pytest.mark.integration,
    # A warning of SQLAlchemy 2.1 about MLflow 3.17's own models.
    pytest.mark.filterwarnings("ignore:The ``noload`` loader strategy is deprecated"),
]

STATUSES: dict[str, Status] = {"FINISHED": "finished", "FAILED": "failed", "KILLED": "killed"}

ALERTS = "memlog/alerts.json"


class TestMlflow(SinkContract):
    # For a sink, it is the failure of a call that was executed. `TestTheSinkInMemory` runs the test.
    test_an_odd_error_of_any_call_loses_nothing = None  # type: ignore[assignment]

    @pytest.fixture(autouse=True)
    def _store(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
        monkeypatch.chdir(tmp_path)
        self.folder = tmp_path / "store"
        self.folder.mkdir()
        self.uri = sqlite_store(self.folder)
        self.client = MlflowClient(self.uri)
        with environment_without_mlflow():
            yield

    def open_sink(self, target: Target) -> Sink:
        from msgspec.structs import replace

        return backend.open_sink(replace(target, connection=Connection(self.uri)))

    def user_run(self) -> TrackerRun:
        return TrackerRun(self.client.create_run("0").info.run_id, self.uri)

    def rows(self, run_id: str) -> Sequence[Row]:
        return [(one.key, one.step, one.value) for one in self._metrics(run_id)]

    def times(self, run_id: str) -> Sequence[Time]:
        return [(one.key, one.step, one.timestamp) for one in self._metrics(run_id)]

    def _metrics(self, run_id: str) -> Iterator[Metric]:
        for key in self.client.get_run(run_id).data.metrics:
            yield from self.client.get_metric_history(run_id, key)

    def parameters(self, run_id: str) -> Mapping[str, str]:
        held = self.client.get_run(run_id).data.params
        return {key.removeprefix("memlog/"): value for key, value in held.items()}

    def alerts(self, run_id: str) -> Sequence[str]:
        if not any(info.path == ALERTS for info in self.client.list_artifacts(run_id, "memlog")):
            return []
        return [row["title"] for row in json.loads(self._content(run_id, ALERTS))["alerts"]]

    def files(self, run_id: str) -> Mapping[tuple[str, str], bytes]:
        return {
            (Path(kind.path).name, Path(file.path).name): self._content(run_id, file.path)
            for kind in self.client.list_artifacts(run_id, "memlog/artifacts")
            for file in self.client.list_artifacts(run_id, kind.path)
        }

    def _content(self, run_id: str, path: str) -> bytes:
        with tempfile.TemporaryDirectory() as folder:
            return Path(self.client.download_artifacts(run_id, path, folder)).read_bytes()

    def ended_ms(self, run_id: str) -> int | None:
        ended: int | None = self.client.get_run(run_id).info.end_time
        return ended

    def status(self, run_id: str) -> Status | None:
        return STATUSES.get(self.client.get_run(run_id).info.status)

    def down(self) -> AbstractContextManager[None]:
        return moved_away(self.folder)


class TestMlflowsStore(ArtifactStoreContract):
    @pytest.fixture(autouse=True)
    def _store(
        self, tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch
    ) -> Iterator[None]:
        root = tmp_path_factory.mktemp("mlflow")
        monkeypatch.chdir(root)
        self.files, self.folder = root / "files", root / "store"
        self.files.mkdir()
        self.folder.mkdir()
        self.uri = sqlite_store(self.folder)
        with environment_without_mlflow():
            yield

    def open_store(self) -> ArtifactStore:
        return backend.open_store(Connection(self.uri))

    def run_with(self, files: Mapping[tuple[str, str], bytes]) -> str:
        sink = backend.open_sink(Target("contract", None, connection=Connection(self.uri)))
        return run_with_files(sink, files, self.files)

    def unknown_run(self) -> str:
        return "0" * 32

    def down(self) -> AbstractContextManager[None]:
        return moved_away(self.folder)

"""MLflow's sink keeps the contract of all sinks, on a database of its own for each test."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import pytest
from mlflow import MlflowClient
from support.mlflow_server import environment_without_mlflow, sqlite_store

from memlog.events import Status
from memlog.sink import Connection, Sink, Target, TrackerRun
from memlog.testing import Row, SinkContract
from memlog_mlflow import backend

pytestmark = [
    pytest.mark.integration,
    # MLflow 3.17's own models, as SQLAlchemy 2.1 sees them.
    pytest.mark.filterwarnings("ignore:The ``noload`` loader strategy is deprecated"),
    pytest.mark.filterwarnings("ignore::FutureWarning:mlflow"),
]

STATUSES: dict[str, Status] = {"FINISHED": "finished", "FAILED": "failed", "KILLED": "killed"}


class TestMlflow(SinkContract):
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
        return [
            (key, metric.step, metric.value)
            for key in self.client.get_run(run_id).data.metrics
            for metric in self.client.get_metric_history(run_id, key)
        ]

    def status(self, run_id: str) -> Status | None:
        return STATUSES.get(self.client.get_run(run_id).info.status)

    @contextmanager
    def down(self) -> Iterator[None]:
        """The disk with the database is gone."""
        away = self.folder.rename(self.folder.with_name("away"))
        yield
        away.rename(self.folder)

"""Tests of the MLflow backend, which finds the user's run without importing mlflow."""

from __future__ import annotations

import json
import subprocess
import sys
import threading
import types
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import mlflow
import pytest
from support.mlflow_server import sqlite_store

from memlog.sink import Backend, Connection, TrackerRun
from memlog_mlflow import backend
from memlog_mlflow.backend import MlflowBackend

# MLflow 3.17's own models, as SQLAlchemy 2.1 sees them.
pytestmark = pytest.mark.filterwarnings("ignore:The ``noload`` loader strategy is deprecated")


@pytest.fixture
def database(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    """A tracking URI that mlflow uses in this process for the time of a test."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("MLFLOW_TRACKING_URI", "to be restored")
    before = mlflow.get_tracking_uri()
    uri = sqlite_store(tmp_path)
    mlflow.set_tracking_uri(uri)
    yield uri
    while mlflow.active_run():
        mlflow.end_run()
    mlflow.set_tracking_uri(before)


def test_it_is_a_backend() -> None:
    assert isinstance(backend, Backend)
    assert (backend.name, backend.requires, backend.extra) == ("mlflow", "mlflow", "mlflow")


def test_importing_and_asking_any_backend_loads_no_client(tmp_path: Path) -> None:
    program = (
        "import json, sys\n"
        "from memlog.sink import find_backends\n"
        "found = find_backends()\n"
        "runs = {name: backend.active_run() for name, backend in found.items()}\n"
        "uri = found['mlflow'].connection().uri\n"
        "clients = {'mlflow', 'numpy', 'opentelemetry.sdk', 'prometheus_client', 'swanlab'}\n"
        "clients |= {'tensorboard', 'trackio', 'wandb'}\n"
        "clients &= set(sys.modules)\n"
        "print(json.dumps([runs, uri, sorted(clients)]))"
    )
    done = subprocess.run(
        [sys.executable, "-c", program],
        env={"PYTHONPATH": ":".join(filter(None, sys.path))},
        cwd=tmp_path,
        capture_output=True,
        text=True,
        check=True,
    )
    backends = (
        "mlflow",
        "otlp",
        "prometheus",
        "swanlab",
        "tensorboard",
        "trackio",
        "wandb",
        "webhook",
    )
    assert json.loads(done.stdout) == [dict.fromkeys(backends), None, []]


@pytest.mark.parametrize("attributes", [{}, {"active_run": lambda: pytest.fail("asked")}])
def test_a_half_imported_mlflow_has_no_run(
    attributes: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    module = types.ModuleType("mlflow")
    vars(module).update(attributes)
    monkeypatch.setitem(sys.modules, "mlflow", module)
    assert backend.active_run() is None
    assert backend.connection().uri is None


def test_the_innermost_run_of_this_thread_or_else_of_the_main_thread_is_found(
    database: str,
) -> None:
    finder, link = MlflowBackend(), f"mlflow ui --backend-store-uri {database}"
    assert finder.active_run() is None
    with mlflow.start_run(run_name="outer") as outer:
        found = TrackerRun(outer.info.run_id, database, "outer", link)
        assert finder.active_run() == found
        with mlflow.start_run(run_name="inner", nested=True) as inner:
            assert finder.active_run() == TrackerRun(inner.info.run_id, database, "inner", link)
        assert finder.active_run() == found
        seen: list[TrackerRun | None] = []

        def work() -> None:
            seen.append(finder.active_run())
            with mlflow.start_run(run_name="of the thread"):
                seen.append(finder.active_run())

        thread = threading.Thread(target=work)
        thread.start()
        thread.join()
        assert seen[0] == found
        assert seen[1] is not None
        assert seen[1].name == "of the thread"
    assert finder.active_run() is None


def test_the_uri_is_resolved_once_a_run(database: str) -> None:
    finder = MlflowBackend()
    with mlflow.start_run():
        assert finder.active_run() is finder.active_run()


def test_the_connection_is_what_mlflow_would_use_now(
    database: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("MLFLOW_TRACKING_USERNAME", "anna")
    monkeypatch.setenv("MLFLOW_RUN_ID", "users-own")
    connection = backend.connection()
    assert isinstance(connection, Connection)
    assert connection.uri == database
    assert connection.environment["MLFLOW_TRACKING_USERNAME"] == "anna"
    assert "MLFLOW_RUN_ID" not in connection.environment


def test_a_relative_uri_is_the_trainers(
    database: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    mlflow.set_tracking_uri("sqlite:///other.db")
    assert backend.connection().uri == f"sqlite:///{tmp_path}/other.db"

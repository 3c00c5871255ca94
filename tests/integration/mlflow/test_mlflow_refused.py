"""Runs of MLflow's that can't be written to: deleted, deleted with their experiment, gone."""

from __future__ import annotations

from pathlib import Path

import pytest
from mlflow import MlflowClient
from mlflow.exceptions import MlflowException
from mlflow.protos.databricks_pb2 import INVALID_PARAMETER_VALUE
from support.mlflow_server import IN_PROCESS, MEMLOG_RUN, points, rss_rows, sink_for, sqlite_store

from memlog.errors import RunRefusedError, TrackerRejectedError
from memlog.events import Alert
from memlog.sink import Connection, Target, TrackerRun
from memlog_mlflow.sink import MlflowSink

pytestmark = IN_PROCESS


@pytest.fixture(params=["database", "folder"])
def uri(tmp_path: Path, request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    if request.param == "database":
        return sqlite_store(tmp_path)
    monkeypatch.setenv("MLFLOW_ALLOW_FILE_STORE", "true")
    return str(tmp_path / "mlruns")


@pytest.fixture
def client(uri: str) -> MlflowClient:
    return MlflowClient(uri)


def test_a_run_that_is_not_there_is_rejected(uri: str) -> None:
    with pytest.raises(RunRefusedError, match="does not exist: it is deleted permanently"):
        sink_for(uri, "0" * 32).open()


def test_a_deleted_run_is_rejected_with_the_remedy(uri: str, client: MlflowClient) -> None:
    run_id = client.create_run("0").info.run_id
    sink = sink_for(uri, run_id)
    sink.open()
    client.delete_run(run_id)
    for refused in (
        lambda: sink.log_points(points(1)),
        lambda: sink.log_parameters({"a": "b"}),
        lambda: sink.log_alerts([Alert(1, 1, "error", "rule", "high", "text")], 0),
        sink_for(uri, run_id).open,
    ):
        with pytest.raises(RunRefusedError, match=f"mlflow runs restore --run-id {run_id}"):
            refused()
    assert not sink.dropped
    client.restore_run(run_id)
    sink.log_points(points(1))
    assert len(rss_rows(client, run_id)) == 1


def test_an_own_run_that_was_deleted_is_rejected_likewise(uri: str, client: MlflowClient) -> None:
    sink = sink_for(uri)
    opened = sink.open()
    client.delete_run(opened.run_id)
    with pytest.raises(RunRefusedError, match="mlflow runs restore"):
        sink.close("finished")
    with pytest.raises(RunRefusedError, match="mlflow runs restore"):
        MlflowSink(Target(MEMLOG_RUN, None, opened, connection=Connection(uri))).open()


def test_a_run_that_was_deleted_with_its_experiment_says_so(uri: str, client: MlflowClient) -> None:
    experiment = client.create_experiment("sweep")
    run_id = client.create_run(experiment).info.run_id
    client.delete_experiment(experiment)
    remedy = f"mlflow experiments restore --experiment-id {experiment}"
    with pytest.raises(RunRefusedError, match=remedy):
        sink_for(uri, run_id).open()


def test_a_run_beside_a_deleted_one_is_found_again(uri: str, client: MlflowClient) -> None:
    def opened(beside: str | None) -> str:
        gone = None if beside is None else TrackerRun(beside)
        target = Target(MEMLOG_RUN, None, beside=gone, connection=Connection(uri))
        return MlflowSink(target).open().run_id

    first = [opened("a" * 32), opened("b" * 32), opened(None)]
    assert len(set(first)) == 3
    assert [opened("a" * 32), opened("b" * 32), opened(None)] == first
    assert client.get_run(first[0]).data.tags["memlog.beside"] == "a" * 32


def test_a_refused_point_of_a_run_that_is_there_is_that_points_alone(
    uri: str, client: MlflowClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    sink = sink_for(uri, client.create_run("0").info.run_id)
    sink.open()

    def refuses(*_: object, **__: object) -> None:
        raise MlflowException("no", INVALID_PARAMETER_VALUE)

    monkeypatch.setattr(MlflowClient, "log_batch", refuses)
    with pytest.raises(TrackerRejectedError) as raised:
        sink.log_points(points(1))
    assert type(raised.value) is TrackerRejectedError

"""The MLflow sink against the real MLflow: a joined run, points, parameters, a server that dies."""

from __future__ import annotations

import math
import os
import subprocess
import sys
import threading
from collections.abc import Iterator, Mapping
from pathlib import Path

import mlflow
import pytest
from mlflow import MlflowClient
from mlflow.entities import Metric, Param, Run
from support.mlflow_server import (
    IN_PROCESS,
    MEMLOG_RUN,
    START_US,
    MlflowServer,
    points,
    rss_rows,
    running_mlflow_server,
    sink_for,
    sqlite_store,
)

from memlog.events import Alert, Status
from memlog.sink import Point, Sink, TrackerRun
from memlog_mlflow.uris import link_to

pytestmark = IN_PROCESS


@pytest.fixture
def uri(tmp_path: Path) -> str:
    return sqlite_store(tmp_path)


@pytest.fixture
def client(uri: str) -> MlflowClient:
    return MlflowClient(uri)


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[MlflowServer]:
    with running_mlflow_server(tmp_path_factory.mktemp("server")) as running:
        yield running


def user_run(client: MlflowClient) -> Run:
    run = client.create_run("0", tags={"team": "vision"}, run_name="mine")
    metrics = [Metric("loss", 1.0 / (step + 1), 1000 + step, step) for step in range(5)]
    client.log_batch(run.info.run_id, metrics=metrics, params=[Param("lr", "0.1")])
    return client.get_run(run.info.run_id)


def without_memlog(named: Mapping[str, object]) -> dict[str, object]:
    return {k: v for k, v in named.items() if not k.startswith(("memlog", "memory/"))}


# The user's run


def test_a_joined_run_is_left_as_it_was(uri: str, client: MlflowClient) -> None:
    before = user_run(client)
    run_id = before.info.run_id
    sink = sink_for(uri, run_id)
    assert isinstance(sink, Sink)
    sink.probe()
    link = link_to(uri, before.info.experiment_id, run_id)
    name = before.info.run_name
    assert sink.open() == sink.open() == TrackerRun(run_id, uri, name, link)
    sink.log_points(points(1000))
    sink.log_parameters({"torch": "2.9"})
    sink.close("failed")
    after = client.get_run(run_id)
    assert (after.info.status, after.info.end_time) == ("RUNNING", None)
    assert after.info.run_name == "mine"
    assert without_memlog(after.data.metrics) == before.data.metrics
    assert without_memlog(after.data.params) == before.data.params
    assert without_memlog(after.data.tags) == before.data.tags
    assert after.data.tags["memlog.run_id"] == MEMLOG_RUN
    assert after.data.params["memlog/torch"] == "2.9"
    assert len(client.get_metric_history(run_id, "loss")) == 5


def test_the_fluent_api_is_not_touched(
    uri: str, client: MlflowClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("MLFLOW_TRACKING_URI", "to be restored")
    mlflow.set_tracking_uri(uri)
    with mlflow.start_run() as run:
        sink = sink_for(uri, run.info.run_id)
        sink.log_points(points(10))
        sink.close("finished")
        active = mlflow.active_run()
        assert active is not None
        assert active.info.run_id == run.info.run_id
        assert mlflow.get_tracking_uri() == uri
    assert len(client.search_runs(["0"])) == 1


def test_a_users_active_model_gets_no_metrics_of_memlog(
    uri: str, client: MlflowClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = client.create_logged_model("0")
    run = user_run(client)
    monkeypatch.setenv("MLFLOW_ACTIVE_MODEL_ID", model.model_id)
    sink = sink_for(uri, run.info.run_id)
    # MLflow looks at the variable once a thread.
    thread = threading.Thread(target=sink.log_points, args=(points(3),))
    thread.start()
    thread.join()
    assert len(rss_rows(client, run.info.run_id)) == 3
    assert not client.get_logged_model(model.model_id).metrics


# Points


def test_what_cannot_be_stored_costs_only_itself(uri: str, client: MlflowClient) -> None:
    sink = sink_for(uri)
    odd = [
        Point("..//bad key?", 1.0, "step", 1, START_US),
        Point("memory/x", math.nan, "step", 1, START_US),
        Point("memory/x", math.inf, "step", 2, START_US),
        Point("memory/x", -math.inf, "step", 3, START_US),
        Point("m" * 400, 1.0, "step", 1, START_US),
    ]
    sink.log_points(points(995) + odd)
    run = client.get_run(sink.open().run_id)
    assert len(rss_rows(client, run.info.run_id)) == 995
    assert len(run.data.metrics) == 4
    [stored] = client.get_metric_history(run.info.run_id, "memory/x")
    assert math.isnan(stored.value)
    assert sink.dropped == {"not_finite": 2}


def test_nothing_to_store_opens_no_run(uri: str, client: MlflowClient) -> None:
    sink = sink_for(uri)
    sink.log_points([])
    sink.log_points([Point("memory/x", math.inf, "step", 1, START_US)])
    assert client.search_runs(["0"]) == []


def test_a_users_wish_for_async_logging_is_not_memlogs(
    uri: str, client: MlflowClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    sink = sink_for(uri)
    run_id = sink.open().run_id
    monkeypatch.setenv("MLFLOW_ENABLE_ASYNC_LOGGING", "true")
    sink.log_points(points(10))
    assert len(rss_rows(client, run_id)) == 10


def test_a_replay_adds_no_rows_to_a_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MLFLOW_ALLOW_FILE_STORE", "true")
    folder = str(tmp_path / "mlruns")
    batch = [*points(20), Point("memory/x", math.nan, "step", 1, START_US)]
    sink = sink_for(folder)
    sink.probe()
    sink.log_points([*batch, *batch])
    sink.log_points(batch)
    sink.log_parameters({"torch": "2.9"})
    other = sink_for(folder)
    other.log_points(points(30))
    other.log_parameters({"torch": "2.10", "python": "3.12"})
    client = MlflowClient(folder)
    run_id = sink.open().run_id
    assert len(rss_rows(client, run_id)) == 30
    assert len(client.get_metric_history(run_id, "memory/x")) == 1
    params = client.get_run(run_id).data.params
    assert params == {"memlog/torch": "2.9", "memlog/python": "3.12"}


# Parameters


def test_a_parameter_that_is_there_with_another_value_stays(uri: str, client: MlflowClient) -> None:
    run_id = user_run(client).info.run_id
    first, second = sink_for(uri, run_id), sink_for(uri, run_id)
    first.log_parameters({"torch": "2.9", "device": "cuda0"})
    first.log_parameters({"torch": "2.9", "device": "cuda0"})
    assert first.dropped == {}
    second.log_parameters({"torch": "2.10", "device": "cuda0", "ranks": "8"})
    params = client.get_run(run_id).data.params
    expected = {"memlog/torch": "2.9", "memlog/device": "cuda0", "memlog/ranks": "8"}
    assert params == {**expected, "lr": "0.1"}
    assert second.dropped == {"parameter_conflict": 1}


def test_many_long_and_odd_parameters_are_stored(uri: str, client: MlflowClient) -> None:
    sink = sink_for(uri)
    many = {f"layer {number}/?": str(number) for number in range(150)}
    sink.log_parameters({**many, "long": "x" * 10_000, "empty": ""})
    sink.log_parameters({**many, "long": "x" * 10_000, "empty": ""})
    params = client.get_run(sink.open().run_id).data.params
    assert len(params) == 152
    assert len(params["memlog/long"]) == 6000
    assert sink.dropped == {}


def test_a_refused_parameter_costs_only_itself(
    uri: str, client: MlflowClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    # A server with a lower limit than this client's: MLflow's had 250, 500 and 6000 characters.
    monkeypatch.setattr("mlflow.utils.validation.MAX_PARAM_VAL_LENGTH", 250)
    monkeypatch.setenv("MLFLOW_TRUNCATE_LONG_VALUES", "false")
    sink = sink_for(uri)
    sink.log_parameters({"long": "x" * 300, "short": "y"})
    assert client.get_run(sink.open().run_id).data.params == {"memlog/short": "y"}
    assert sink.dropped == {"parameter_rejected": 1}


@pytest.mark.parametrize(
    ("first", "second", "kept"),
    [
        ("finished", "killed", "FINISHED"),
        ("failed", "killed", "FAILED"),
        ("finished", "failed", "FINISHED"),
        ("killed", "finished", "FINISHED"),
        ("killed", "failed", "FAILED"),
    ],
)
def test_a_status_that_the_run_has_does_not_get_worse(
    uri: str, client: MlflowClient, first: Status, second: Status, kept: str
) -> None:
    run_id = sink_for(uri).open().run_id
    for status in (first, second):
        sink = sink_for(uri)
        assert sink.open().run_id == run_id
        sink.close(status)
    assert client.get_run(run_id).info.status == kept


# A server


@pytest.mark.slow
def test_an_own_run_on_a_server(server: MlflowServer, capfd: pytest.CaptureFixture[str]) -> None:
    client = MlflowClient(server.url)
    sink = sink_for(server.url, project="vision")
    run_id = sink.open().run_id
    assert sink_for(server.url, project="vision").open().run_id == run_id
    odd = [Point("memory/x", value, "step", 1, START_US) for value in (math.nan, math.inf)]
    longest = [Point(f"{step:04d}" * 70, 1e300, "step", step, START_US) for step in range(998)]
    sink.log_points(longest + odd)
    sink.log_parameters({"torch": "2.9"})
    sink_for(server.url, project="vision").log_parameters({"torch": "2.10", "python": "3.12"})
    sink.close("killed")
    run = client.get_run(run_id)
    assert run.info.status == "KILLED"
    assert len(run.data.metrics) == 999
    assert run.data.params == {"memlog/torch": "2.9", "memlog/python": "3.12"}
    assert capfd.readouterr().out == ""


# The process in which the sink runs


def test_it_prints_nothing_and_starts_no_thread(tmp_path: Path) -> None:
    program = (
        "import sys, threading\n"
        "from memlog.sink import Connection, Point, Target\n"
        "from memlog_mlflow import backend\n"
        "connection = Connection(uri=sys.argv[1])\n"
        "sink = backend.open_sink(Target('r', joined=None, project='p', connection=connection))\n"
        "sink.probe(); sink.open()\n"
        "sink.log_points([Point('m', 1.0, 'step', 1, 1)])\n"
        "sink.log_parameters({'long': 'x' * 9000})\n"
        "sink.close('finished')\n"
        "assert threading.enumerate() == [threading.main_thread()], threading.enumerate()\n"
    )
    # Without the variables of tests and build machines, with which MLflow switches its telemetry off.
    marks = {"PYTEST_CURRENT_TEST", "CI", "GITHUB_ACTIONS"}
    environment = {name: value for name, value in os.environ.items() if name not in marks}
    environment["PYTHONPATH"] = os.pathsep.join(filter(None, sys.path))
    done = subprocess.run(
        [sys.executable, "-c", program, f"sqlite:///{tmp_path}/new.db"],
        check=False,
        env=environment,
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert (done.stdout, done.stderr, done.returncode) == ("", "", 0)


def test_alerts_are_a_file_and_tags(client: MlflowClient, uri: str) -> None:
    run = user_run(client)
    sink = sink_for(uri, joined=run.info.run_id)
    sink.open()
    alerts = [
        Alert(START_US + step, step, "warning", "host.rss > 1 GiB", f"host.rss is {step} GiB", "")
        for step in range(2, 4)
    ]
    sink.log_alerts(alerts[:1], 0)
    for _ in range(2):  # the second time is a replay
        sink.log_alerts(alerts, 1)
    tags = client.get_run(run.info.run_id).data.tags
    assert {key: tags[key] for key in tags if key.startswith("memlog.alert")} == {
        "memlog.alert.last": "host.rss is 3 GiB (step 3)",
        "memlog.alert.level": "warning",
        "memlog.alert.count": "2",
    }
    table = mlflow.artifacts.load_dict(f"{run.info.artifact_uri}/memlog/alerts.json")
    assert [(row["step"], row["rule"]) for row in table["alerts"]] == [
        (2, "host.rss > 1 GiB"),
        (3, "host.rss > 1 GiB"),
    ]

"""memlog's own run in MLflow: opened once, found again, in the experiment that MLflow would choose."""

from __future__ import annotations

import sys

import pytest
from mlflow import MlflowClient
from mlflow.entities import Experiment
from support.mlflow_server import IN_PROCESS, MEMLOG_RUN, sink_for

from memlog.errors import TrackerRejectedError
from memlog.sink import Connection, Target
from memlog_mlflow import backend, runs
from memlog_mlflow.sink import MlflowSink

pytestmark = IN_PROCESS


# memlog's own run


def test_closing_what_was_never_opened_opens_nothing(uri: str, client: MlflowClient) -> None:
    sink_for(uri).close("finished")
    assert client.search_runs(["0"]) == []


def test_a_joined_run_is_not_taken_for_memlogs_own(uri: str, client: MlflowClient) -> None:
    mine = client.create_run("0").info.run_id
    sink_for(uri, mine).open()
    own = sink_for(uri)
    assert own.open().run_id != mine
    own.close("killed")
    assert client.get_run(mine).info.status == "RUNNING"


def test_an_own_run_has_the_tags_that_mlflow_would_give(
    uri: str, client: MlflowClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "argv", ["train.py"])
    monkeypatch.setenv("MLFLOW_TRACKING_USERNAME", "anna")
    gathered = Connection(uri=uri, environment=backend.connection().environment)
    target = Target(MEMLOG_RUN, joined=None, name="first try", connection=gathered)
    run = client.get_run(backend.open_sink(target).open().run_id)
    assert run.info.run_name == "first try"
    assert run.data.tags["mlflow.user"] == "anna"
    assert run.data.tags["mlflow.source.name"] == "train.py"
    assert run.data.tags["mlflow.source.type"] == "LOCAL"


def test_a_run_without_a_name_gets_one_of_mlflows(uri: str, client: MlflowClient) -> None:
    assert client.get_run(sink_for(uri).open().run_id).info.run_name


# The experiment


def experiment_of(client: MlflowClient, sink: MlflowSink) -> str:
    run = client.get_run(sink.open().run_id)
    return str(client.get_experiment(run.info.experiment_id).name)


def test_the_project_is_the_experiment(
    uri: str, client: MlflowClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert experiment_of(client, sink_for(uri)) == "Default"
    assert experiment_of(client, sink_for(uri, project="vision")) == "vision"
    monkeypatch.setenv("MLFLOW_EXPERIMENT_NAME", "from the environment")
    assert experiment_of(client, sink_for(uri)) == "from the environment"
    assert experiment_of(client, sink_for(uri, project="vision")) == "vision"
    # As mlflow.set_experiment leaves it, which outranks the name.
    chosen = client.create_experiment("chosen")
    monkeypatch.setenv("MLFLOW_EXPERIMENT_ID", chosen)
    assert experiment_of(client, sink_for(uri)) == "chosen"


def test_an_experiment_that_is_not_there_is_rejected(
    uri: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("MLFLOW_EXPERIMENT_ID", "4711")
    with pytest.raises(TrackerRejectedError, match="4711"):
        sink_for(uri).open()


def test_a_deleted_experiment_is_rejected_with_the_remedy(uri: str, client: MlflowClient) -> None:
    client.delete_experiment(client.create_experiment("old"))
    with pytest.raises(TrackerRejectedError, match="mlflow experiments restore") as caught:
        sink_for(uri, project="old").open()
    assert "\n" not in str(caught.value)


class OvertakenClient(MlflowClient):
    """A client that looks for an experiment just before another process creates it."""

    overtaken = False

    def get_experiment_by_name(self, name: str) -> Experiment | None:
        found = super().get_experiment_by_name(name)
        if not self.overtaken:
            self.overtaken = True
            MlflowClient(self.tracking_uri).create_experiment(name)
        return found


def test_an_experiment_that_somebody_else_creates_first_is_used(
    uri: str, client: MlflowClient
) -> None:
    overtaken = OvertakenClient(uri)
    run = runs.find_or_create(overtaken, Target(MEMLOG_RUN, joined=None, project="shared"))
    assert overtaken.overtaken
    shared = client.get_experiment_by_name("shared")
    assert shared is not None
    assert client.get_run(run.info.run_id).info.experiment_id == shared.experiment_id

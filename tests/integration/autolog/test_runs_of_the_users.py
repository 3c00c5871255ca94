"""Choice of the MLflow run that gets a session's points, and the end of memlog's own runs."""

import warnings
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
from click.testing import CliRunner
from support import child
from support.mlflow_server import environment_without_mlflow
from support.truth import wait_until_delivered

from memlog.cli.main import cli

if TYPE_CHECKING:
    from mlflow import MlflowClient

pytestmark = pytest.mark.integration
with_a_store = pytest.mark.usefixtures("ready_store")

PREAMBLE = """
    import os
    import sys
    import time

    import memlog

    def train(session, steps):
        for _ in range(steps):
            session.step()
            time.sleep(0.001)
"""
WITH_MLFLOW = "\n    import mlflow" + PREAMBLE
"""Script that imports MLflow first, so that the program and memlog's helper have it imported already."""


def client_of(directory: Path) -> "MlflowClient":
    from mlflow import MlflowClient

    return MlflowClient(f"sqlite:///{directory}/mlflow.db")


def runs_in(directory: Path) -> dict[str, tuple[str, int]]:
    """Return each run's status and number of memlog's points in a folder's store, by the run's name."""
    client = client_of(directory)
    experiments = [experiment.experiment_id for experiment in client.search_experiments()]
    return {
        run.info.run_name: (
            run.info.status,
            len(client.get_metric_history(run.info.run_id, "memory/host/rss_mib")),
        )
        for run in client.search_runs(experiments)
    }


@with_a_store
def test_with_nothing_named_it_joins_what_appears_and_follows_the_folds(tmp_path: Path) -> None:
    child.run(
        PREAMBLE
        + """
    session = memlog.init(finish_timeout=120)
    import mlflow

    for fold in range(2):
        with mlflow.start_run(run_name=f"fold-{fold}"):
            train(session, 30)
    train(session, 5)   # after the last run: still its
    memlog.finish()
    """,
        tmp_path,
    )
    assert runs_in(tmp_path) == {"fold-0": ("FINISHED", 30), "fold-1": ("FINISHED", 35)}


def test_with_nothing_named_and_no_run_it_opens_none(tmp_path: Path) -> None:
    child.run(
        PREAMBLE
        + """
    session = memlog.init()
    import mlflow

    train(session, 5)
    memlog.finish()
    """,
        tmp_path,
    )
    assert not (tmp_path / "mlflow.db").exists()


@with_a_store
def test_a_run_opened_after_the_first_steps_is_joined_and_has_them(tmp_path: Path) -> None:
    child.run(
        WITH_MLFLOW
        + """
    session = memlog.init("mlflow", finish_timeout=120, config={"memlog": {"bind_grace": 60}})
    train(session, 5)
    with mlflow.start_run(run_name="late"):
        train(session, 5)
    memlog.finish()
    """,
        tmp_path,
    )
    assert runs_in(tmp_path) == {"late": ("FINISHED", 10)}


SWEEP = """
    session = memlog.init("mlflow", alerts=["host.rss > 1 MiB"], finish_timeout=120)
    for number in range(4):
        with mlflow.start_run(run_name=f"r{number}") as run:
            train(session, 10)
        if number < 2:
            mlflow.delete_run(run.info.run_id)
    memlog.finish()
"""


def memlog(directory: Path, *arguments: str) -> tuple[int, str]:
    """Run a command of memlog's in this process; return its exit code and output."""
    runs = str(directory / "memlog_runs")
    store = {"MLFLOW_TRACKING_URI": f"sqlite:///{directory}/mlflow.db"}
    with environment_without_mlflow():
        done = CliRunner().invoke(cli, [*arguments, "--dir", runs], prog_name="memlog", env=store)
    return done.exit_code, done.output


def sync(directory: Path, *arguments: str) -> tuple[int, str]:
    return memlog(directory, "sync", "latest", *arguments)


def purge(directory: Path, run_id: str) -> None:
    """Run ``mlflow gc`` in this process."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of modules that mlflow's other commands import
        from mlflow.cli import cli as mlflow

    store = f"sqlite:///{directory}/mlflow.db"
    arguments = ("gc", "--backend-store-uri", store, "--tracking-uri", store, "--run-ids", run_id)
    with environment_without_mlflow():
        done = CliRunner().invoke(mlflow, arguments)
    assert done.exit_code == 0, done.output


@with_a_store
def test_deleted_runs_hold_up_no_other_and_lose_no_point(tmp_path: Path) -> None:
    """One deleted run of a sweep is restored. Later points of a purged run go to a run of memlog's own.

    The points that were delivered before the user deleted the run are purged with it.
    """
    from mlflow.entities import ViewType

    process = child.start(WITH_MLFLOW + SWEEP, tmp_path)
    _, errors = process.communicate(timeout=240)
    client = client_of(tmp_path)
    deleted = client.search_runs(["0"], run_view_type=ViewType.DELETED_ONLY)
    gone = {run.info.run_name: run.info.run_id for run in deleted}
    others = {"r2": ("FINISHED", 10), "r3": ("FINISHED", 10)}
    assert runs_in(tmp_path) == others
    restore = "the MLflow run {0} is deleted (`mlflow runs restore --run-id {0}`)".format
    assert f"memlog: mlflow: {restore(gone['r0'])}" in errors
    assert "not everything is delivered" not in errors  # `finish` did not wait for the deleted runs
    assert restore(gone["r0"]) in memlog(tmp_path, "runs")[1]
    code, output = sync(tmp_path)
    assert code != 0
    assert restore(gone["r0"]) in output

    client.restore_run(gone["r0"])
    purge(tmp_path, gone["r1"])
    code, output = sync(tmp_path)
    assert code != 0
    assert f"the MLflow run {gone['r1']} does not exist: it is deleted permanently" in output
    assert "--own-run" in output
    assert runs_in(tmp_path) == {**others, "r0": ("FINISHED", 10)}

    assert sync(tmp_path, "--own-run")[0] == 0
    delivered = runs_in(tmp_path)
    assert len(delivered) == 4
    (own,) = delivered.keys() - others.keys() - {"r0"}
    status, points = delivered[own]
    assert status == "FINISHED"
    assert 1 <= points <= 10
    assert {name: each for name, each in delivered.items() if name != own} == {
        **others,
        "r0": ("FINISHED", 10),
    }
    assert sync(tmp_path)[0] == 0
    assert runs_in(tmp_path) == delivered
    assert wait_until_delivered(tmp_path / "memlog_runs").dropped == {}


@with_a_store
def test_a_run_that_is_deleted_and_restored_in_mid_run_lacks_nothing(tmp_path: Path) -> None:
    child.run(
        WITH_MLFLOW
        + """
    session = memlog.init("mlflow", finish_timeout=120)
    from memlog.journal.delivery_state import UploadState
    from memlog.journal import RunDirectory

    directory = RunDirectory(session.directory)

    def wait_for(what):
        deadline = time.monotonic() + 120
        while not what(UploadState.load(directory, "mlflow")):
            assert time.monotonic() < deadline
            time.sleep(0.1)

    client = mlflow.MlflowClient()
    with mlflow.start_run(run_name="users") as run:
        train(session, 250)
        wait_for(lambda state: state.delivered)
        client.delete_run(run.info.run_id)
        train(session, 150)
        wait_for(lambda state: state.refused)
        client.restore_run(run.info.run_id)
        train(session, 50)
    memlog.finish()
    """,
        tmp_path,
    )
    assert runs_in(tmp_path) == {"users": ("FINISHED", 450)}
    state = wait_until_delivered(tmp_path / "memlog_runs")
    assert (state.dropped, state.problem) == ({}, None)


@with_a_store
def test_a_deleted_experiment_is_not_waited_for(tmp_path: Path) -> None:
    process = child.start(
        WITH_MLFLOW
        + """
    experiment = mlflow.create_experiment("sweep")
    mlflow.delete_experiment(experiment)
    session = memlog.init("mlflow", project="sweep", finish_timeout=120)
    train(session, 10)
    memlog.finish()
    """,
        tmp_path,
    )
    _, errors = process.communicate(timeout=100)  # `finish` would wait 120 s for the experiment
    assert "mlflow experiments restore --experiment-id 1" in errors
    client_of(tmp_path).restore_experiment("1")
    assert sync(tmp_path)[0] == 0
    assert [points for _, points in runs_in(tmp_path).values()] == [10]

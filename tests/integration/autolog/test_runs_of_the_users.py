"""Which MLflow run a session's points go to, and how a run of memlog's own ends."""

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from click.testing import CliRunner
from support import child
from support.mlflow_server import environment_without_mlflow
from support.truth import wait_until_delivered

from memlog.cli.main import cli

pytestmark = [
    pytest.mark.integration,
    pytest.mark.filterwarnings("ignore::FutureWarning:mlflow"),
    pytest.mark.filterwarnings("ignore::DeprecationWarning:mlflow"),
]
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


def runs_in(directory: Path) -> dict[str, tuple[str, int]]:
    """Status and number of memlog's points of every run in a folder's store, by name."""
    from mlflow import MlflowClient

    client = MlflowClient(f"sqlite:///{directory}/mlflow.db")
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
        PREAMBLE
        + """
    session = memlog.init("mlflow", finish_timeout=120, config={"memlog": {"bind_grace": 60}})
    import mlflow

    train(session, 5)
    with mlflow.start_run(run_name="late"):
        train(session, 5)
    memlog.finish()
    """,
        tmp_path,
    )
    assert runs_in(tmp_path) == {"late": ("FINISHED", 10)}


ENDS = {
    "exit without finish": ("pass", "FINISHED"),
    "uncaught exception": ("raise ValueError('no')", "FAILED"),
    "said": ("memlog.finish('failed')", "FAILED"),
    "killed": ("os.kill(os.getpid(), 9)", "KILLED"),
}


@pytest.mark.parametrize("how", ENDS)
@with_a_store
def test_a_run_of_memlogs_own_ends_as_the_training_did(tmp_path: Path, how: str) -> None:
    ending, status = ENDS[how]
    process = child.start(
        PREAMBLE
        + f"""
    session = memlog.init("mlflow", name="own", project="p", finish_timeout=120)
    train(session, 5)
    {ending}
    """,
        tmp_path,
    )
    process.communicate(timeout=240)
    wait_until_delivered(tmp_path / "memlog_runs")
    assert runs_in(tmp_path) == {"own": (status, 5)}


@with_a_store
def test_ctrl_c_ends_the_run_as_killed(tmp_path: Path) -> None:
    process = child.start(
        PREAMBLE
        + """
    session = memlog.init("mlflow", name="own", finish_timeout=120)
    train(session, 5)
    print("ready", flush=True)
    time.sleep(600)
    """,
        tmp_path,
    )
    process.stdout.readline()
    process.send_signal(signal.SIGINT)
    _, errors = process.communicate(timeout=240)
    assert "KeyboardInterrupt" in errors
    wait_until_delivered(tmp_path / "memlog_runs")
    assert runs_in(tmp_path) == {"own": ("KILLED", 5)}


SWEEP = """
    session = memlog.init("mlflow", alerts=["host.rss > 1 MiB"], finish_timeout=120)
    import mlflow

    for number in range(4):
        with mlflow.start_run(run_name=f"r{number}") as run:
            train(session, 10)
        if number == 0:
            mlflow.delete_run(run.info.run_id)
    memlog.finish()
"""


def memlog(directory: Path, *arguments: str) -> tuple[int, str]:
    """A command of memlog's, in this process: its exit code and what it printed."""
    runs = str(directory / "memlog_runs")
    with environment_without_mlflow():
        done = CliRunner().invoke(cli, [*arguments, "--dir", runs], prog_name="memlog")
    return done.exit_code, done.output


def sync(directory: Path, *arguments: str) -> tuple[int, str]:
    return memlog(directory, "sync", "latest", *arguments)


def mlflow_says(directory: Path, *arguments: str) -> None:
    subprocess.run(
        [sys.executable, "-m", "mlflow", *arguments],
        cwd=directory,
        env={**os.environ, "MLFLOW_TRACKING_URI": f"sqlite:///{directory}/mlflow.db"},
        capture_output=True,
        timeout=120,
        check=True,
    )


def deleted_in(directory: Path) -> str:
    from mlflow import MlflowClient
    from mlflow.entities import ViewType

    client = MlflowClient(f"sqlite:///{directory}/mlflow.db")
    [run] = client.search_runs(["0"], run_view_type=ViewType.DELETED_ONLY)
    return str(run.info.run_id)


@with_a_store
def test_a_deleted_run_of_a_sweep_holds_up_no_other_and_gets_its_points_once_it_is_restored(
    tmp_path: Path,
) -> None:
    process = child.start(PREAMBLE + SWEEP, tmp_path)
    _, errors = process.communicate(timeout=240)
    gone = deleted_in(tmp_path)
    others = {f"r{number}": ("FINISHED", 10) for number in (1, 2, 3)}
    assert runs_in(tmp_path) == others
    remedy = f"the MLflow run {gone} is deleted (`mlflow runs restore --run-id {gone}`)"
    assert f"memlog: mlflow: {remedy}" in errors
    assert "not everything is delivered" not in errors  # it was not waited for
    for _, said in (memlog(tmp_path, "runs"), sync(tmp_path)):
        assert remedy in said
    assert sync(tmp_path)[0] != 0
    mlflow_says(tmp_path, "runs", "restore", "--run-id", gone)
    assert sync(tmp_path)[0] == 0
    assert runs_in(tmp_path) == {**others, "r0": ("FINISHED", 10)}
    assert wait_until_delivered(tmp_path / "memlog_runs").dropped == {}


@with_a_store
def test_what_is_for_a_run_that_was_purged_goes_to_one_of_memlogs_own_where_that_is_wanted(
    tmp_path: Path,
) -> None:
    child.run(PREAMBLE + SWEEP, tmp_path)
    gone = deleted_in(tmp_path)
    store = f"sqlite:///{tmp_path}/mlflow.db"
    mlflow_says(tmp_path, "gc", "--backend-store-uri", store, "--run-ids", gone)
    code, said = sync(tmp_path)
    assert code != 0
    assert f"the MLflow run {gone} does not exist: it is deleted permanently" in said
    assert "--own-run" in said
    assert sync(tmp_path, "--own-run")[0] == 0
    delivered = runs_in(tmp_path)
    assert len(delivered) == 4
    assert set(delivered.values()) == {("FINISHED", 10)}
    assert sync(tmp_path)[0] == 0
    assert runs_in(tmp_path) == delivered


@with_a_store
def test_a_run_that_is_deleted_and_restored_in_mid_run_lacks_nothing(tmp_path: Path) -> None:
    child.run(
        PREAMBLE
        + """
    session = memlog.init("mlflow", finish_timeout=120)
    import mlflow
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
        PREAMBLE
        + """
    import mlflow

    experiment = mlflow.create_experiment("sweep")
    mlflow.delete_experiment(experiment)
    session = memlog.init("mlflow", project="sweep", finish_timeout=120)
    train(session, 10)
    memlog.finish()
    """,
        tmp_path,
    )
    _, errors = process.communicate(timeout=100)  # it would take 120 s
    assert "mlflow experiments restore --experiment-id 1" in errors
    mlflow_says(tmp_path, "experiments", "restore", "--experiment-id", "1")
    assert sync(tmp_path)[0] == 0
    assert [points for _, points in runs_in(tmp_path).values()] == [10]

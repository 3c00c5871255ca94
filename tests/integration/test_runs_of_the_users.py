"""Which MLflow run a session's points go to, and how a run of memlog's own ends."""

import signal
from pathlib import Path

import pytest
from support import child
from support.truth import wait_until_delivered

pytestmark = [
    pytest.mark.integration,
    pytest.mark.filterwarnings("ignore::FutureWarning:mlflow"),
    pytest.mark.filterwarnings("ignore::DeprecationWarning:mlflow"),
]

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
    "terminated": ("os.kill(os.getpid(), 15)", "KILLED"),
}


@pytest.mark.parametrize("how", ENDS)
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
    assert process.stdout is not None
    process.stdout.readline()
    process.send_signal(signal.SIGINT)
    _, errors = process.communicate(timeout=240)
    assert "KeyboardInterrupt" in errors
    wait_until_delivered(tmp_path / "memlog_runs")
    assert runs_in(tmp_path) == {"own": ("KILLED", 5)}

"""The description of a run that memlog opened in MLflow: the verdict, a table, and how to see the rest."""

import os
import signal
import threading
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
from support import child
from support.child import kill_helper

from memlog.journal import RunDirectory, find_run, list_runs
from memlog.reports import summarize

if TYPE_CHECKING:
    from mlflow import MlflowClient

pytestmark = [pytest.mark.integration, pytest.mark.usefixtures("ready_store")]

NOTE = "mlflow.note.content"

TRAIN = """
    import sys
    import time

    import memlog

    session = memlog.init("mlflow", finish_timeout=120, config={"memlog": {"bind_grace": 0.1}})
    for _ in range(30):
        session.step()
        time.sleep(0.002)
    if "--wait" in sys.argv:
        print("trained", flush=True)
        time.sleep(600)
"""


def client_of(directory: Path) -> "MlflowClient":
    from mlflow import MlflowClient

    return MlflowClient(f"sqlite:///{directory}/mlflow.db")


def only_run(directory: Path) -> Any:
    client = client_of(directory)
    [run] = client.search_runs([one.experiment_id for one in client.search_experiments()])
    return run


def recorded(directory: Path) -> RunDirectory:
    return find_run(directory / "memlog_runs", "latest")


def test_a_run_of_memlogs_own_is_described_at_its_end(tmp_path: Path) -> None:
    child.run(TRAIN, tmp_path)
    run, journal = only_run(tmp_path), recorded(tmp_path)
    lines = run.data.tags[NOTE].splitlines()
    assert lines[0].startswith("**")
    assert "peak " in lines[0]
    assert "| Run | finished, 30 steps in " in run.data.tags[NOTE]
    assert "| Peak of the process | " in run.data.tags[NOTE]
    where = f"{journal.id} --dir {tmp_path}/memlog_runs"
    assert f"memlog show {where}" in lines
    assert f"memlog report {where} -o report.html" in lines
    assert "memlog open" not in run.data.tags[NOTE]  # the run has no flame graph
    assert lines[-2].startswith("`report.html`, among this run's artifacts, ")
    pull = lines[-1].split("`")[1].removeprefix("memlog ").split()
    elsewhere = {"MLFLOW_TRACKING_URI": f"sqlite:///{tmp_path}/mlflow.db", "MEMLOG_DIR": "none"}
    assert "out/report.html" in child.memlog(*pull, directory=tmp_path, **elsewhere)
    # memlog's own figures are parameters, since nothing was lost.
    assert {name for name in run.data.metrics if name.startswith("memlog/")} == set()
    assert (run.data.params["memlog/dropped"], run.data.params["memlog/faults"]) == ("0", "0")
    assert float(run.data.params["memlog/overhead_ms"]) > 0
    shown = child.memlog("show", "latest", "--all", directory=tmp_path)
    assert "memlog/overhead_ms" in shown
    # A later `memlog sync` does not replace a description that a user has written.
    client_of(tmp_path).set_tag(run.info.run_id, NOTE, "my own words")
    child.memlog("sync", "latest", directory=tmp_path)
    assert only_run(tmp_path).data.tags[NOTE] == "my own words"


def test_a_run_that_was_cut_off_is_described_by_sync(tmp_path: Path) -> None:
    with child.start(TRAIN, tmp_path, "--wait") as trainer:
        assert trainer.stdout is not None
        assert trainer.stdout.readline() == "trained\n"
        watchdog = threading.Timer(100, trainer.kill)
        watchdog.start()
        kill_helper(recorded(tmp_path))
        os.kill(trainer.pid, signal.SIGKILL)
        trainer.communicate()
        watchdog.cancel()
    address = {"MLFLOW_TRACKING_URI": f"sqlite:///{tmp_path}/mlflow.db"}
    child.memlog("sync", "latest", directory=tmp_path, **address)
    run = only_run(tmp_path)
    assert run.info.status == "KILLED"
    assert run.data.tags[NOTE].startswith("**Ended unexpectedly after step 29. ")
    assert "| Run | killed, 30 steps in " in run.data.tags[NOTE]


USERS = """
    import time

    import mlflow

    import memlog

    run_id = None
    for part in range(2):
        session = memlog.init("mlflow", finish_timeout=120)
        with mlflow.start_run(run_id=run_id) as run:
            for _ in range(10):
                session.step()
                time.sleep(0.002)
        run_id = run.info.run_id
        memlog.finish()
"""


def test_a_users_run_is_described_again_by_each_session(tmp_path: Path) -> None:
    child.run(USERS, tmp_path)
    run = only_run(tmp_path)
    newest = recorded(tmp_path)
    assert f"memlog show {newest.id} " in run.data.tags[NOTE]
    assert run.data.params["memlog/dropped"] == "0"
    journals = list_runs(tmp_path / "memlog_runs")
    assert len(journals) == 2
    for journal in journals:
        assert summarize(journal).health.dropped == {}

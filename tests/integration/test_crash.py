"""The bet of the design: what was published survives, and reaches the tracker once."""

import random
import subprocess
import threading
from pathlib import Path

import pytest
from support import child
from support.child import kill_helper
from support.truth import plan_of, rows_in_mlflow, rows_of, wait_until_delivered

from memlog.delivery.state import CourierState
from memlog.events import Batch
from memlog.journal import RunDirectory, find_run

pytestmark = [
    pytest.mark.integration,
    pytest.mark.filterwarnings("ignore::FutureWarning:mlflow"),
    pytest.mark.filterwarnings("ignore::DeprecationWarning:mlflow"),
]

PUBLISHER = """
    import os
    import sys

    import memlog

    session = memlog.init(sys.argv[1], dir="runs")
    step = 0
    while True:
        session.step()
        os.write(1, b"%d\\n" % step)   # only after the call has returned
        step += 1
"""


def kill_after_first_step(process: "subprocess.Popen[str]", seconds: float) -> int:
    """Ends a publisher with SIGKILL that long after its first step; returns the last it had told."""
    assert process.stdout is not None
    told = [process.stdout.readline()]
    threading.Timer(seconds, process.kill).start()
    told += (
        process.stdout.readlines()
    )  # meanwhile, or the publisher would wait for room in the pipe
    process.wait(timeout=30)
    process.stdout.close()
    if process.stderr is not None:
        process.stderr.close()
    whole = [line for line in told if line.endswith("\n")]
    return int(whole[-1])


def steps_in(run: RunDirectory) -> list[int]:
    return [
        entry.event.step
        for file in run.files()
        for entry in file.read()
        if isinstance(entry.event, Batch)
    ]


def test_what_was_published_before_a_sigkill_is_in_the_journal(tmp_path: Path) -> None:
    moments = random.Random(20).choices(range(300), k=12)  # noqa: S311 - moments, not secrets
    survived = []
    for attempt, moment in enumerate(moments):
        directory = tmp_path / str(attempt)
        directory.mkdir()
        process = child.start(PUBLISHER, directory, "local")
        last = kill_after_first_step(process, moment / 1000)
        steps = steps_in(find_run(directory / "runs", "latest"))
        assert steps[: last + 1] == list(range(last + 1))
        survived.append(last + 1)
    print(f"events that survived, by kill: {sorted(survived)}")


def test_a_killed_run_reaches_mlflow_whole_and_once(tmp_path: Path) -> None:
    from mlflow import MlflowClient

    process = child.start(PUBLISHER, tmp_path, "mlflow")
    kill_after_first_step(process, 0.2)
    run = find_run(tmp_path / "runs", "latest")
    assert not run.is_alive()
    kill_helper(run)

    arguments = ("sync", "latest", "--dir", "runs", "--timeout", "120")
    child.memlog(*arguments, directory=tmp_path)
    own = CourierState.load(run, "mlflow").own_run
    assert own is not None
    uri = f"sqlite:///{tmp_path}/mlflow.db"
    expected = rows_of(plan_of(run))
    assert set(rows_in_mlflow(uri, own.run_id)) == set(expected)
    child.memlog(*arguments, directory=tmp_path)
    again = rows_in_mlflow(uri, own.run_id)
    assert set(again) == set(expected)
    assert set(again.values()) == {1}
    assert MlflowClient(uri).get_run(own.run_id).info.status == "KILLED"


def test_the_helper_outlives_a_killed_trainer_and_delivers_the_rest(tmp_path: Path) -> None:
    process = child.start(PUBLISHER, tmp_path, "mlflow")
    kill_after_first_step(process, 0.2)
    run = find_run(tmp_path / "runs", "latest")
    own = wait_until_delivered(tmp_path / "runs").own_run
    assert own is not None
    rows = rows_in_mlflow(f"sqlite:///{tmp_path}/mlflow.db", own.run_id)
    assert rows == rows_of(plan_of(run))

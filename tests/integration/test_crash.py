"""The bet of the design: what was published survives, and reaches the tracker once."""

import os
import random
import signal
import subprocess
import threading
import time
from pathlib import Path
from statistics import quantiles

import pytest
from support import child
from support.child import kill_helper
from support.truth import plan_of, rows_in_mlflow, rows_of, wait_until_delivered

from memlog.analysis import summarize
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


@pytest.mark.slow
def test_what_was_published_before_a_sigkill_is_in_the_journal(tmp_path: Path) -> None:
    """At a hundred random moments; a sample of them then goes to MLflow, where it is the plan's points."""
    chance = random.Random(20)  # noqa: S311 - moments, not secrets
    survived = []
    for attempt in range(100):
        directory = tmp_path / str(attempt)
        directory.mkdir()
        process = child.start(PUBLISHER, directory, "local")
        last = kill_after_first_step(process, chance.uniform(0, 0.4))
        run = find_run(directory / "runs", "latest")
        steps = steps_in(run)
        assert steps[: last + 1] == list(range(last + 1))
        assert len(steps) - last in (1, 2)  # the one that it was at may be there, too
        assert summarize(run).status == "killed"
        survived.append(last + 1)
    tenths = [f"{part:,.0f}" for part in quantiles(survived, n=10)]
    print(f"events that survived, tenths of 100 kills: {', '.join(tenths)}; all {sum(survived):,}")
    assert len(set(survived)) > 50
    uri = f"sqlite:///{tmp_path}/mlflow.db"
    for attempt in chance.sample(range(100), 4):
        runs = tmp_path / str(attempt) / "runs"
        command = ("sync", "latest", "--to", "mlflow", "--dir", str(runs))
        child.memlog(*command, directory=tmp_path, MLFLOW_TRACKING_URI=uri)
        expect_the_plan(find_run(runs, "latest"), uri)


def expect_the_plan(run: RunDirectory, uri: str) -> None:
    """MLflow has what the journal gives, each point once."""
    own = CourierState.load(run, "mlflow").own_run
    assert own is not None
    assert rows_in_mlflow(uri, own.run_id) == rows_of(plan_of(run))


PACED = """
    import sys
    import time

    import memlog

    session = memlog.init("mlflow", dir="runs", config={"memlog": {"bind_grace": 0}})
    print(session._live._helper.pid, flush=True)
    until = time.monotonic() + float(sys.argv[1]) + 0.5
    while time.monotonic() < until:
        session.step()
        time.sleep(0.0005)
    session.finish(timeout=0)
"""


@pytest.mark.slow
def test_a_helper_killed_at_random_moments_doubles_nothing(tmp_path: Path) -> None:
    """Before, while and after it hands its first points over; then the rest is synced."""
    chance = random.Random(7)  # noqa: S311 - moments, not secrets
    had = []
    for attempt in range(5):
        directory = tmp_path / str(attempt)
        directory.mkdir()
        moment = chance.uniform(2, 7)
        process = child.start(PACED, directory, str(moment))
        assert process.stdout is not None
        helper = int(process.stdout.readline())
        time.sleep(moment)
        os.kill(helper, signal.SIGKILL)
        process.communicate(timeout=60)
        assert process.returncode == 0
        run = find_run(directory / "runs", "latest")
        had.append(CourierState.load(run, "mlflow").delivered)
        child.memlog("sync", "latest", "--dir", "runs", directory=directory)
        expect_the_plan(run, f"sqlite:///{directory}/mlflow.db")
    print(f"points that MLflow had when the helper died: {had}")


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

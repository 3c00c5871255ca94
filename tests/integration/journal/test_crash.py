"""The main promise of the design: published events survive a crash and reach the tracker one time."""

import os
import random
import signal
import subprocess
import time
from collections import Counter
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from operator import attrgetter
from pathlib import Path

import pytest
from support import child
from support.kills import (
    Killed,
    Nursery,
    lines_of_the_newest_segment,
    rows_by_run,
    steps_in,
    sync_all,
)
from support.mlflow_server import running_mlflow_server, sqlite_store
from support.outages import wait_for_state
from support.truth import Row, plan_of, rows_in_mlflow, rows_of, wait_until_delivered

from memlog.delivery.helper.postmortem import UNEXPECTED_END
from memlog.events import Batch, Loss
from memlog.journal import RunDirectory, find_run
from memlog.journal.delivery_state import UploadState
from memlog.reports import summarize

pytestmark = pytest.mark.integration


@pytest.mark.slow
def test_what_was_published_before_a_sigkill_is_in_the_journal(tmp_path: Path) -> None:
    """At least 26 trainers are killed at random moments, some when the segment or the user's run changes.

    Ten of the runs are then synced twice. MLflow has all points of their journals, each point once, in
    memlog's own runs and in the user's.
    """
    from mlflow import MlflowClient

    uri = sqlite_store(tmp_path)
    client = MlflowClient(uri)
    users = [client.create_run("0").info.run_id for _ in range(4)]
    chance = random.Random(20)  # noqa: S311 - moments, not secrets
    nursery = Nursery(tmp_path, uri, users)
    try:
        changing = kill_many(nursery, tmp_path, "segments", lambda: 10 ** chance.uniform(-3, -0.5))
        binding = kill_many(nursery, tmp_path, "bindings", lambda: 10 ** chance.uniform(-3, -1))
    finally:
        nursery.close()
    for killed in changing + binding:
        expect_returned_steps(killed)
    # To sync longer runs would take minutes.
    short = [killed for killed in changing if killed.last < 2000]
    to_sync = [*chance.sample(short, 5), *chance.sample(binding, 5)]
    for _ in range(2):
        sync_all([killed.directory for killed in to_sync], tmp_path, uri)
        expect_all_once([killed.run for killed in to_sync], uri)


KILLS = int(os.environ.get("MEMLOG_TESTS_KILLS", "12"))
"""Number of busy trainers to kill; ``MEMLOG_TESTS_KILLS=200`` takes minutes."""


@pytest.mark.slow
def test_what_six_threads_published_before_a_sigkill_is_in_the_journal(tmp_path: Path) -> None:
    """The main thread trains traced steps, five threads publish, and two threads compute all the time."""
    chance = random.Random(21)  # noqa: S311 - moments, not secrets
    nursery = Nursery(tmp_path, sqlite_store(tmp_path), ["none"])
    published = 0
    try:
        for number in range(KILLS):
            killed = nursery.kill_one(
                tmp_path / str(number), "busy", 10 ** chance.uniform(-2.5, 0.2)
            )
            published += expect_every_thread(killed)
    finally:
        nursery.close()
    print(f"{published:,} events of {KILLS} killed trainers are in their journals")


def expect_every_thread(killed: Killed) -> int:
    """Check that the journal has all events whose calls had returned, in each thread's order."""
    last = {thread: number for thread, number in killed.returned}  # noqa: C416 - pairs, not tuples of any length
    found: dict[int, list[int]] = {thread: [] for thread in range(6)}
    for file in killed.run.files("trainer"):
        for entry in file.read(complete=True):
            if isinstance(entry.event, Loss):
                found[int(entry.event.value or 0)].append(entry.event.step)
            elif isinstance(entry.event, Batch):
                found[0].append(entry.event.step)
        assert set(file.skipped) <= {"torn"}
    for thread, number in last.items():
        assert found[thread][: number + 1] == list(range(number + 1))
        assert len(found[thread]) - number in (1, 2)
    assert summarize(killed.run).status == "killed"
    return sum(last.values()) + len(last)


def kill_many(
    nursery: Nursery, directory: Path, kind: str, seconds: Callable[[], float]
) -> list[Killed]:
    """Kill 13 trainers, and then more until two died at the beginning of a segment."""
    killed: list[Killed] = []
    while len(killed) < 13 or sum(map(at_a_beginning, killed)) < 2:
        assert len(killed) < 60
        killed.append(nursery.kill_one(directory / f"{kind}-{len(killed)}", kind, seconds()))
    survived = sorted(one.last + 1 for one in killed)
    print(f"{kind}: steps that {len(killed)} killed trainers had published: {survived}")
    return killed


def at_a_beginning(killed: Killed) -> bool:
    """Return True if the trainer died at the first line of a segment, or before it."""
    return lines_of_the_newest_segment(killed.run) <= 1


def expect_returned_steps(killed: Killed) -> None:
    """Check that the journal has, in order, all steps whose call had returned and at most one more."""
    steps = steps_in(killed.run)
    assert steps[: killed.last + 1] == list(range(killed.last + 1))
    assert len(steps) - killed.last in (1, 2)
    assert summarize(killed.run).status == "killed"


def expect_all_once(runs: list[RunDirectory], uri: str) -> None:
    """Check that MLflow has all points of the journals, each point once and in the right run."""
    from mlflow import MlflowClient

    expected: dict[str, Counter[Row]] = {}
    for run in runs:
        own = UploadState.load(run, "mlflow").own_run
        if own is not None:
            assert MlflowClient(uri).get_run(own.run_id).info.status == "KILLED"
        for target, rows in rows_by_run(run, own and own.run_id).items():
            expected.setdefault(target, Counter()).update(rows)
    points = 0
    for target, rows in expected.items():
        assert rows_in_mlflow(uri, target) == rows
        points += rows.total()
    print(f"{len(runs)} runs synced to {len(expected)} of MLflow's: {points:,} points, each once")


def expect_the_plan(run: RunDirectory, uri: str) -> None:
    """Check that memlog's own run in MLflow has all points of the journal, each point once."""
    own = UploadState.load(run, "mlflow").own_run
    assert own is not None
    assert rows_in_mlflow(uri, own.run_id) == rows_of(plan_of(run))


PACED = """
    import time

    import memlog

    config = {"memlog": {"bind_grace": 0, "segment_bytes": 8192, "linger": 20}}
    session = memlog.init("mlflow", dir="runs", config=config)
    print(session._live._helper.pid, flush=True)
    while True:
        session.step()
        time.sleep(0.0005)
"""


@pytest.mark.slow
def test_a_helper_killed_at_random_moments_doubles_nothing(tmp_path: Path) -> None:
    """Each helper is killed before, while or after it sends its first points. Its trainer is killed, too."""
    kill_helpers(tmp_path / "runs", sqlite_store(tmp_path), 3)


@pytest.mark.slow
def test_a_killed_helper_that_delivers_to_a_server_doubles_nothing(tmp_path: Path) -> None:
    """A server still carries out the requests of a client that was killed."""
    sqlite_store(tmp_path)  # to create the store's tables takes seconds
    with running_mlflow_server(tmp_path, f"sqlite:///{tmp_path}/mlflow.db") as server:
        kill_helpers(tmp_path / "runs", server.url, 2)


def kill_helpers(root: Path, uri: str, count: int) -> None:
    """Kill ``count`` helpers and their trainers, three at a time, and sync the points not yet delivered."""
    root.mkdir()
    chance = random.Random(7)  # noqa: S311 - moments, not secrets
    with ThreadPoolExecutor(3) as pool:
        jobs = [
            pool.submit(kill_both, root / str(at), uri, random.Random(chance.random()), at)  # noqa: S311 - a seed
            for at in range(count)
        ]
    had = sorted(job.result() for job in jobs)
    print(f"points that MLflow had when {count} helpers died: {had}")
    assert had[-1] > 0
    directories = [root / str(at) for at in range(count)]
    sync_all(directories, root, uri)
    for directory in directories:
        expect_the_plan(find_run(directory / "runs", "latest"), uri)


def kill_both(directory: Path, uri: str, chance: random.Random, number: int) -> int:
    """Kill a helper and its trainer; return the number of points that the helper had saved as delivered."""
    directory.mkdir()
    trainer = child.start(PACED, directory, MLFLOW_TRACKING_URI=uri)
    assert trainer.stdout is not None
    helper = int(trainer.stdout.readline())
    # Kill the first helper at any moment, the second after a delivery, the third when delivery begins.
    if number:
        has_begun = attrgetter("delivered" if number == 1 else "own_run")
        wait_for_state(directory, "mlflow", lambda state: bool(has_begun(state)))
        time.sleep(chance.uniform(0, 1))
    else:
        time.sleep(chance.uniform(0, 4))
    for pid in chance.sample([helper, trainer.pid], 2):
        os.kill(pid, signal.SIGKILL)
        time.sleep(chance.uniform(0, 0.3))
    trainer.communicate(timeout=60)
    return UploadState.load(find_run(directory / "runs", "latest"), "mlflow").delivered


RESTARTED = """
    import sys
    import time

    import memlog

    alerts = ["host.tree > 1 MiB", "host.tree > 9 TiB"]
    config = {"memlog": {"bind_grace": 0, "sample_interval": 0.05}}
    session = memlog.init("mlflow", dir="runs", alerts=alerts, config=config)
    helper = session._live._helper
    first = helper.pid
    print(first, flush=True)
    deadline = time.monotonic() + 60
    while helper.is_away or helper.pid == first:
        assert time.monotonic() < deadline
        session.step()
        time.sleep(0.005)
    print(helper.pid, flush=True)
    until = time.monotonic() + 2
    while time.monotonic() < until or "forever" in sys.argv:
        session.step()
        time.sleep(0.005)
    session.finish(timeout=60)
"""


def kill_first_helper(directory: Path, *arguments: str) -> "tuple[subprocess.Popen[str], int]":
    """Kill the helper of a run that has begun to deliver; return the trainer and the next helper."""
    sqlite_store(directory)
    trainer = child.start(RESTARTED, directory, *arguments)
    assert trainer.stdout is not None
    first = int(trainer.stdout.readline())
    wait_for_state(directory, "mlflow", lambda state: state.own_run is not None)
    os.kill(first, signal.SIGKILL)
    return trainer, int(trainer.stdout.readline())


def test_a_helper_that_was_killed_is_started_again_and_goes_on(tmp_path: Path) -> None:
    """The run's points and alerts arrive once. The helper's end is printed once, and `memlog show` has it."""
    trainer, _ = kill_first_helper(tmp_path)
    _, errors = trainer.communicate(timeout=120)
    assert trainer.returncode == 0
    run = find_run(tmp_path / "runs", "latest")
    expect_the_plan(run, f"sqlite:///{tmp_path}/mlflow.db")
    summary = summarize(run)
    assert UploadState.load(run, "mlflow").stage == "done"
    assert [alert.rule for alert in summary.alerts] == ["host.tree > 1 MiB"]
    assert summary.health.unjudged == {}
    assert summary.health.faults == {
        "the helper process: ended (SIGKILL)": 1,
        "the helper process: started again": 1,
    }
    assert errors.count("the helper process has ended (SIGKILL)") == 1


def test_the_next_helper_outlives_its_trainer_and_explains_its_end(tmp_path: Path) -> None:
    trainer, helper = kill_first_helper(tmp_path, "forever")
    run = find_run(tmp_path / "runs", "latest")
    deadline = time.monotonic() + 60
    while not list(run.path.glob(f"helper-{helper}-*")):
        assert time.monotonic() < deadline
        time.sleep(0.02)
    trainer.kill()
    trainer.communicate(timeout=60)
    wait_until_delivered(tmp_path / "runs")
    summary = summarize(run)
    assert summary.status == "killed"
    assert [alert.rule for alert in summary.alerts] == ["host.tree > 1 MiB", UNEXPECTED_END]
    assert (run.artifacts / "postmortem.md").exists()
    expect_the_plan(run, f"sqlite:///{tmp_path}/mlflow.db")

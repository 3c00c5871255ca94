"""Forks, threads and workers: nothing hangs, and no helper is left behind."""

from pathlib import Path

import pytest
from support import child
from support.programs import AT_MOST, PREFACE, ended, expect_no_helper, status_and_steps, summaries

import memlog
from memlog.events import Batch, Sample
from memlog.journal import RunDirectory, list_runs

pytestmark = pytest.mark.integration


def test_a_fork_leaves_the_run_to_its_parent(tmp_path: Path) -> None:
    """The forked child steps and finishes, exits by itself, fails, or is killed."""
    script = """
    session = begin()

    def child(number):
        session.step()
        if number == 0:
            memlog.finish("failed")
            os._exit(0)
        if number == 1:
            sys.exit(0)
        if number == 2:
            raise ValueError
        os.kill(os.getpid(), signal.SIGKILL)

    for number in range(4):
        session.step()
        if os.fork() == 0:
            sys.stderr = None
            child(number)
        os.wait()
    """
    assert status_and_steps(tmp_path, script) == [("finished", 4)]


def test_a_program_that_becomes_a_daemon_says_that_it_records_nothing(tmp_path: Path) -> None:
    """The program forks twice after `init`, as daemons do. The run is the first process's, which ends."""
    script = """
    import torch

    session = begin(config={"quiet": True})
    session.step()
    if os.fork():
        os._exit(0)
    os.setsid()
    if os.fork():
        os._exit(0)
    optimizer = torch.optim.SGD(torch.nn.Linear(1, 1).parameters(), lr=0.1)
    for _ in range(3):
        session.step()
        optimizer.step()
    os._exit(0)
    """
    process = child.start(PREFACE + script, tmp_path)
    output, errors = process.communicate(timeout=AT_MOST)  # waits for the last process
    assert process.returncode == 0
    [line] = errors.splitlines()
    assert line.startswith("memlog: this process is a fork of the one that began the run")
    assert "call memlog.init() after the fork" in line
    expect_no_helper(output)
    assert [(run.status, run.steps) for run in summaries(tmp_path)] == [("killed", 1)]


def test_a_fork_may_begin_a_run_of_its_own(tmp_path: Path) -> None:
    script = """
    session = begin()
    session.step()
    if os.fork() == 0:
        own = begin()
        for _ in range(5):
            own.step()
        sys.exit(0)
    os.wait()
    session.step()
    """
    assert sorted(status_and_steps(tmp_path, script)) == [("finished", 2), ("finished", 5)]


def test_a_fork_with_a_run_of_its_own_is_not_said_to_have_none(tmp_path: Path) -> None:
    """The copied session's hooks are in the child, too."""
    script = """
    import torch

    session = begin(config={"quiet": True})
    if os.fork() == 0:
        begin(config={"quiet": True})
        optimizer = torch.optim.SGD(torch.nn.Linear(1, 1).parameters(), lr=0.1)
        for _ in range(5):
            optimizer.step()
        sys.exit(0)
    os.wait()
    session.step()
    """
    process = child.start(PREFACE + script, tmp_path)
    _, errors = process.communicate(timeout=AT_MOST)
    assert "is a fork" not in errors
    assert sorted(run.steps for run in summaries(tmp_path)) == [1, 5]


def test_a_child_that_outlives_the_trainer_keeps_no_helper(tmp_path: Path) -> None:
    """The child keeps the helper's pipe open."""
    script = """
    session = begin()
    session.step()
    if os.fork() == 0:
        os.closerange(0, 3)
        time.sleep(20)
        os._exit(0)
    os.kill(os.getpid(), signal.SIGKILL)
    """
    assert status_and_steps(tmp_path, script, -9) == [("killed", 1)]


LOADER = """
    import torch

    class Data(torch.utils.data.Dataset):
        def __len__(self):
            return 40

        def __getitem__(self, index):
            time.sleep(0.01)
            return torch.ones(8)

    if __name__ == "__main__":
        session = begin(config={"memlog": {"sample_interval": 0.05}})
        model = torch.nn.Linear(8, 1)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        for method in ("fork", "spawn"):
            loader = torch.utils.data.DataLoader(
                Data(), num_workers=2, multiprocessing_context=method
            )
            for batch in loader:
                model(batch).mean().backward()
                optimizer.step()
        while not any(b'"sample"' in path.read_bytes() for path in session.directory.glob("helper-*")):
            time.sleep(0.01)
"""


def test_data_loader_workers(tmp_path: Path) -> None:
    """Workers publish nothing and count as the user's processes. The helper does not count."""
    [summary] = ended(tmp_path, LOADER)
    assert (summary.status, summary.steps) == ("finished", 80)
    [run] = list_runs(tmp_path / "runs")
    entries = list(run.events())
    assert [event.step for event in entries if isinstance(event, Batch)] == list(range(80))
    counted = {event.tree_processes for event in entries if isinstance(event, Sample)}
    # The trainer, two workers, and, with spawn, the process that tracks shared resources.
    assert counted
    assert counted <= {1, 2, 3, 4}


def test_a_run_that_is_over_before_its_helper_is_up_is_sampled(tmp_path: Path) -> None:
    with memlog.init("local", dir=tmp_path) as session:
        session.step()
    assert session.directory is not None
    entries = list(RunDirectory(session.directory).events())
    samples = [event for event in entries if isinstance(event, Sample)]
    assert samples
    assert samples[0].tree_pss is not None


def test_the_helper_is_not_in_the_users_tree(tmp_path: Path) -> None:
    """Neither the run's own helper nor that of the previous run, which may still deliver, is in the tree."""
    script = """
    begin()
    session = begin(config={"memlog": {"sample_interval": 0.05}})
    while sum(p.read_bytes().count(b'"sample"') for p in session.directory.glob("helper-*")) < 5:
        session.step()
    """
    ended(tmp_path, script)
    samples = [
        entry.event.tree_processes
        for run in list_runs(tmp_path / "runs")
        for file in run.files()
        for entry in file.read()
        if isinstance(entry.event, Sample)
    ]
    assert set(samples) == {1}


def test_a_working_directory_that_is_gone_costs_nothing(tmp_path: Path) -> None:
    script = """
    import pathlib
    import shutil

    runs, gone = pathlib.Path("runs").absolute(), pathlib.Path("gone").absolute()
    gone.mkdir()
    os.chdir(gone)
    shutil.rmtree(gone)
    session = memlog.init("local", dir=runs)
    print("helper", session._live._helper.pid, flush=True)
    session.step()
    session.finish()
    assert not session.health.faults, session.health.faults
    assert list(session.directory.glob("helper-*")), (session.directory / "helper.log").read_text()
    """
    assert status_and_steps(tmp_path, script) == [("finished", 1)]

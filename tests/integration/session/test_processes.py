"""Forks, threads, signals and every way to end: nothing hangs, and no helper is left behind."""

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from click.testing import CliRunner
from support import child

import memlog
from memlog.cli.sync import sync
from memlog.delivery.helper.postmortem import explain_afterwards
from memlog.delivery.helper.process import ANOTHER_PROGRAM
from memlog.events import Batch, End, Recorded, Sample
from memlog.journal import RunDirectory, list_runs
from memlog.reports import Summary, summarize

pytestmark = pytest.mark.integration

AT_MOST = 60
"""Seconds that any of these programs may take, on a busy machine."""

PREFACE = """
    import os
    import signal
    import sys
    import time

    import memlog

    def begin(backend="local", **options):
        session = memlog.init(backend, dir="runs", **options)
        print("helper", session._live._helper.pid, flush=True)
        return session
"""


def ended(directory: Path, script: str, *, code: int = 0) -> list[Summary]:
    """Runs a program to its end; its runs, after every helper that it started is gone."""
    process = child.start(PREFACE + script, directory)
    output, errors = process.communicate(timeout=AT_MOST)
    assert process.returncode == code, errors
    expect_no_helper(output)
    return summaries(directory)


def expect_no_helper(output: str) -> None:
    helpers = [int(line.split()[1]) for line in output.splitlines() if line.startswith("helper ")]
    assert helpers
    deadline = time.monotonic() + AT_MOST
    while any(child.lives(pid) for pid in helpers):
        assert time.monotonic() < deadline, "a helper outlives its trainer"
        time.sleep(0.05)


def summaries(directory: Path) -> list[Summary]:
    return [summarize(run) for run in list_runs(directory / "runs")]


def status_and_steps(directory: Path, script: str, code: int = 0) -> list[tuple[str, int]]:
    return [(run.status, run.steps) for run in ended(directory, script, code=code)]


ENDINGS = {
    "finish twice": ("s = begin(); s.step(); memlog.finish(); s.finish(); memlog.finish()", 0),
    "no finish": ("s = begin(); s.step()", 0),
    "a block": ("with begin() as s: s.step()", 0),
    "exit in a block": ("with begin() as s: s.step(); sys.exit(3)", 3),
    "an error in a block": ("with begin() as s: s.step(); raise ValueError", 1),
    "an error": ("s = begin(); s.step(); raise ValueError", 1),
    "ctrl-c in a block": ("with begin() as s: s.step(); raise KeyboardInterrupt", -2),
    "os._exit": ("s = begin(); s.step(); os._exit(0)", 0),
    "an abort": ("s = begin(); s.step(); os.abort()", -6),
    "closed stdio": ("s = begin(); s.step(); sys.stdout = sys.stderr = None", 0),
    "a thread that never ends": (
        "import threading; s = begin(); s.step(); "
        "threading.Thread(target=time.sleep, args=(1e6,), daemon=True).start()",
        0,
    ),
}
STATUSES = {
    "exit in a block": "failed",
    "an error in a block": "failed",
    "an error": "failed",
    "ctrl-c in a block": "killed",
    "os._exit": "killed",
    "an abort": "killed",
}


@pytest.mark.parametrize("how", ENDINGS)
def test_every_end_is_an_end(tmp_path: Path, how: str) -> None:
    script, code = ENDINGS[how]
    found = status_and_steps(tmp_path, f"\n    {script}\n", code)
    assert found == [(STATUSES.get(how, "finished"), 1)]


BECOMES = {
    "the same, in another environment": (
        "os.execve(sys.executable, [sys.executable, *sys.orig_argv[1:]], {**os.environ, 'AGAIN': '1'})"
    ),
    "another one": "os.execv('/bin/sh', ['sh', '-c', 'echo another; read end'])",
}


@pytest.mark.skipif(sys.platform != "linux", reason="elsewhere nobody can tell")
@pytest.mark.parametrize("becomes", BECOMES)
def test_a_run_ends_where_its_process_becomes_another_program(tmp_path: Path, becomes: str) -> None:
    """Nothing of it lives on but its number and the time at which it began."""
    script = f"""
    if "AGAIN" in os.environ:
        print("another", flush=True)
        sys.exit(sys.stdin.read())
    session = begin()
    session.step()
    print(os.read(0, 1), flush=True)
    {BECOMES[becomes]}
    """
    process = child.start(PREFACE + script, tmp_path, stdin=subprocess.PIPE)
    assert process.stdout is not None
    assert process.stdin is not None
    helper = process.stdout.readline()
    [run] = summaries(tmp_path)
    assert run.status == "running"
    process.stdin.write("x")
    process.stdin.flush()
    process.stdout.readline()
    assert process.stdout.readline() == "another\n"
    expect_no_helper(helper)
    [run] = summaries(tmp_path)
    assert (run.status, run.steps, run.alerts) == ("killed", 1, [])
    assert process.poll() is None
    process.communicate(timeout=AT_MOST)
    [folder] = list_runs(tmp_path / "runs")
    ends = [e.event for f in folder.files() for e in f.read() if isinstance(e.event, End)]
    assert [end.reason for end in ends] == [ANOTHER_PROGRAM]
    explain_afterwards(folder)
    assert summaries(tmp_path)[0].alerts == []


def test_sync_explains_no_end_while_the_helper_is_at_work(tmp_path: Path) -> None:
    """Nor where a step of the clock makes a live run look dead, in a journal that knows only the clock."""
    script = """
    import psutil
    from memlog.journal import format

    known = psutil.Process.create_time
    psutil.Process.create_time = lambda self: known(self) - 60
    format.own_birth = lambda: ()
    session = begin()
    session.step()
    helper = session.directory / "helper.lock"
    while not helper.exists():
        time.sleep(0.01)
    print("ready", flush=True)
    sys.stdin.read()
    """
    process = child.start(PREFACE + script, tmp_path, stdin=subprocess.PIPE)
    assert process.stdout is not None
    helper = process.stdout.readline()
    assert process.stdout.readline() == "ready\n"
    [folder] = list_runs(tmp_path / "runs")
    assert not folder.is_alive()
    told = CliRunner().invoke(sync, [folder.id, "--dir", str(tmp_path / "runs")])
    assert "recorded for no tracker" in str(told.exception)
    assert not folder.artifacts.exists()
    assert not process.communicate(timeout=AT_MOST)[1]
    expect_no_helper(helper)
    [run] = summaries(tmp_path)
    assert (run.status, run.alerts, run.artifacts) == ("finished", [], [])


def test_init_again_as_in_a_notebook(tmp_path: Path) -> None:
    """A shell has seen an error before, and a cell is run again and again without finish."""
    script = """
    sys.ps1, sys.last_value = ">>> ", ValueError()
    for cell in range(3):
        session = begin()
        for _ in range(cell + 1):
            session.step()
    """
    runs = status_and_steps(tmp_path, script)
    assert sorted(runs) == [("finished", 1), ("finished", 2), ("finished", 3)]


FORKS = {
    "that steps and finishes": "session.step(); memlog.finish('failed'); os._exit(0)",
    "that exits by itself": "session.step(); sys.exit(0)",
    "that fails": "session.step(); raise ValueError",
    "that is killed": "os.kill(os.getpid(), signal.SIGKILL)",
}


@pytest.mark.parametrize("does", FORKS)
def test_a_fork_leaves_the_run_to_its_parent(tmp_path: Path, does: str) -> None:
    script = f"""
    session = begin()
    session.step()
    if os.fork() == 0:
        sys.stderr = None
        {FORKS[does]}
    os.wait()
    session.step()
    """
    assert status_and_steps(tmp_path, script) == [("finished", 2)]


def test_a_program_that_becomes_a_daemon_says_that_it_records_nothing(tmp_path: Path) -> None:
    """Forked twice, as daemons are, after init: the run was its first process's, which is gone."""
    script = """
    import torch

    session = begin()
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
    output, errors = process.communicate(timeout=AT_MOST)  # until the last of them has ended
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


def test_a_child_that_outlives_the_trainer_keeps_no_helper(tmp_path: Path) -> None:
    """It holds the helper's pipe open."""
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
        session = begin(config={{"memlog": {{"sample_interval": 0.05}}}})
        model = torch.nn.Linear(8, 1)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        for epoch in range(2):
            loader = torch.utils.data.DataLoader(
                Data(), num_workers=2, multiprocessing_context="{method}"
            )
            for batch in loader:
                model(batch).mean().backward()
                optimizer.step()
            helper = session.directory.glob("helper-*")
            while epoch == 1 and not any(b'"sample"' in path.read_bytes() for path in helper):
                helper = session.directory.glob("helper-*")
"""


@pytest.mark.parametrize("method", ["fork", "spawn"])
def test_data_loader_workers(tmp_path: Path, method: str) -> None:
    """They publish nothing, and count as the user's processes; the helper does not."""
    [summary] = ended(tmp_path, LOADER.format(method=method))
    assert (summary.status, summary.steps) == ("finished", 80)
    [run] = list_runs(tmp_path / "runs")
    entries = [entry.event for file in run.files() for entry in file.read()]
    assert [event.step for event in entries if isinstance(event, Batch)] == list(range(80))
    counted = {event.tree_processes for event in entries if isinstance(event, Sample)}
    # Alone, with two workers, and for spawn with the process that looks after shared resources.
    assert counted
    assert counted <= {1, 2, 3, 4}


def test_a_run_that_is_over_before_its_helper_is_up_is_sampled(tmp_path: Path) -> None:
    with memlog.init("local", dir=tmp_path) as session:
        session.step()
    assert session.directory is not None
    entries = [e.event for file in RunDirectory(session.directory).files() for e in file.read()]
    samples = [event for event in entries if isinstance(event, Sample)]
    assert samples
    assert samples[0].tree_pss is not None


def test_the_helper_is_not_in_the_users_tree(tmp_path: Path) -> None:
    """Neither its own nor that of the run before, which may still deliver."""
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


SIGNALS = {
    "its own SIGINT handler": (
        "signal.signal(signal.SIGINT, lambda *_: (print('saved'), sys.exit(7)))",
        signal.SIGINT,
        7,
        "finished",
    ),
    "its own SIGTERM handler": (
        "signal.signal(signal.SIGTERM, lambda *_: (print('saved'), sys.exit(7)))",
        signal.SIGTERM,
        7,
        "finished",
    ),
    "no handler, SIGTERM": ("print('saved')", signal.SIGTERM, -signal.SIGTERM, "killed"),
    "no handler, SIGINT": ("print('saved')", signal.SIGINT, -signal.SIGINT, "killed"),
}


@pytest.mark.parametrize("how", SIGNALS)
def test_signals_do_what_the_user_had_them_do(tmp_path: Path, how: str) -> None:
    prepare, number, code, status = SIGNALS[how]
    script = f"""
    before = signal.getsignal(signal.SIGINT), signal.getsignal(signal.SIGTERM)
    session = begin()
    assert before == (signal.getsignal(signal.SIGINT), signal.getsignal(signal.SIGTERM))
    {prepare}
    step = 0
    while True:
        session.step()
        step += 1
        if step == 100:
            print("ready", flush=True)
    """
    process = child.start(PREFACE + script, tmp_path)
    assert process.stdout is not None
    said = ""
    while "ready" not in said:
        said += process.stdout.readline()
    time.sleep(0.1)
    process.send_signal(number)
    output, errors = process.communicate(timeout=AT_MOST)
    assert process.returncode == code, errors
    assert "saved" in said + output
    expect_no_helper(said + output)
    [summary] = summaries(tmp_path)
    assert summary.status == status
    assert summary.steps >= 100


PREEMPTED = """
    session = memlog.init("mlflow", dir="runs")
    print("helper", session._live._helper.pid, flush=True)
    for _ in range(300):
        session.step()
    print("ready", flush=True)
    time.sleep(60)
"""


@pytest.mark.usefixtures("ready_store")
@pytest.mark.filterwarnings("ignore::FutureWarning:mlflow")
@pytest.mark.filterwarnings("ignore::DeprecationWarning:mlflow")
def test_preemption_leaves_time_to_flush(tmp_path: Path) -> None:
    """The whole job is told to end, the helper as well, before MLflow has had anything."""
    from support.truth import plan_of, rows_in_mlflow, rows_of, wait_until_delivered

    process = child.start(PREFACE + PREEMPTED, tmp_path)
    assert process.stdout is not None
    helper = int(process.stdout.readline().split()[1])
    assert process.stdout.readline() == "ready\n"
    [run] = list_runs(tmp_path / "runs")
    deadline = time.monotonic() + AT_MOST
    while not list(run.path.glob("helper-*")):  # before that it can't hear
        assert time.monotonic() < deadline
        time.sleep(0.01)
    time.sleep(0.2)
    os.kill(helper, signal.SIGTERM)
    process.terminate()
    process.communicate(timeout=AT_MOST)
    own = wait_until_delivered(tmp_path / "runs", seconds=AT_MOST).own_run
    assert own is not None
    rows = rows_in_mlflow(f"sqlite:///{tmp_path}/mlflow.db", own.run_id)
    assert rows == rows_of(plan_of(run))


THREADS = """
    import json
    import threading

    from memlog.events import Recorded

    session = begin()

    def publish(number):
        for index in range(30_000):
            session.publish(Recorded(index, str(number), None))

    threads = [threading.Thread(target=publish, args=(number,)) for number in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    memlog.finish()
    print(json.dumps([session.health.dropped, session.health.faults]))
"""


@pytest.mark.slow
def test_eight_threads_lose_nothing_and_keep_their_order(tmp_path: Path) -> None:
    output = child.run(PREFACE + THREADS, tmp_path)
    assert json.loads(output.splitlines()[-1]) == [{}, {}]
    [run] = list_runs(tmp_path / "runs")
    told: dict[str, list[int]] = {}
    seen = []
    for entry in RunDirectory(run.path).files()[0].read():
        seen.append(entry.seq)
        if isinstance(entry.event, Recorded):
            told.setdefault(entry.event.label, []).append(entry.event.time_us)
    assert seen == list(range(len(seen)))
    assert told == {str(number): list(range(30_000)) for number in range(8)}


def test_a_run_that_is_over_holds_no_descriptor(tmp_path: Path) -> None:
    script = """
    def descriptors():
        return len(os.listdir("/proc/self/fd"))

    def again():
        session = begin(finish_timeout=0)   # ends the one before
        session.step()
        os.kill(session._live._helper.pid, signal.SIGKILL)   # twenty would take their time to end

    again()
    memlog.finish()
    before = descriptors()
    for _ in range(20):
        again()
    memlog.finish()
    assert descriptors() == before, os.popen(f"ls -l /proc/{os.getpid()}/fd").read()
    """
    assert status_and_steps(tmp_path, script) == [("finished", 1)] * 21


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


def test_a_fork_while_another_thread_begins_a_run(tmp_path: Path) -> None:
    """The child may begin a run of its own, whatever that thread was doing."""
    script = """
    import threading

    over = False

    def again():
        while not over:
            begin(finish_timeout=0)

    thread = threading.Thread(target=again)
    thread.start()
    for number in range(15):
        time.sleep(0.002 * number)
        if os.fork() == 0:
            signal.alarm(30)
            memlog.init("local", dir="children", finish_timeout=0).step()
            memlog.finish()
            os._exit(0)
    statuses = [os.wait()[1] for _ in range(15)]
    over = True
    thread.join()
    memlog.finish()
    assert statuses == [0] * 15, statuses
    """
    assert {run.status for run in ended(tmp_path, script)} == {"finished"}
    assert len(list_runs(tmp_path / "children")) == 15


def test_a_killed_helper_is_reported_and_shown(tmp_path: Path) -> None:
    script = """
    session = begin()
    session.step()
    os.kill(session._live._helper.pid, signal.SIGKILL)
    time.sleep(0.5)
    session.step()
    session.finish()
    """
    process = child.start(PREFACE + script, tmp_path)
    _, errors = process.communicate(timeout=AT_MOST)
    [ended] = errors.splitlines()
    assert "the helper process has ended (SIGKILL)" in ended
    [summary] = summaries(tmp_path)
    assert (summary.status, summary.steps) == ("finished", 2)
    assert summary.health.faults == {"the helper process: ended with -9": 1}
    assert summary.health.overhead_ms_per_step


TRAINING = {
    "in a block": """
    with begin("mlflow", **options) as session:
        train(session)
    """,
    "called": """
    session = begin("mlflow", **options)
    try:
        train(session)
    finally:
        session.finish(timeout=60)
    """,
    "at exit": """
    train(begin("mlflow", **options))
    """,
}


@pytest.mark.parametrize("way", TRAINING)
def test_a_second_ctrl_c_ends_the_waiting_and_prints_nothing_of_memlogs(
    tmp_path: Path, way: str
) -> None:
    """The first one's way out, and its exit code, stay as they are."""
    script = f"""
    import threading

    def interrupt_in(seconds):
        timer = threading.Timer(seconds, os.kill, (os.getpid(), signal.SIGINT))
        timer.daemon = True
        timer.start()

    def train(session):
        session.step()
        interrupt_in(0.5)
        interrupt_in(1.5)  # before finish leaves a tracker that does not answer to the helper
        time.sleep(60)

    options = {{"finish_timeout": 60, "config": {{"memlog": {{"linger": 3}}}}}}
    {TRAINING[way]}
    """
    process = child.start(PREFACE + script, tmp_path, MLFLOW_TRACKING_URI="http://127.0.0.1:9")
    output, errors = process.communicate(timeout=AT_MOST)
    assert process.returncode == -signal.SIGINT
    assert errors.count("Traceback") == errors.count("\nKeyboardInterrupt\n") == 1
    assert str(Path(memlog.__file__).parent) not in errors
    [told] = [line for line in errors.splitlines() if "not everything is delivered after" in line]
    assert "`memlog sync " in told
    expect_no_helper(output)
    [summary] = summaries(tmp_path)
    assert (summary.status, summary.steps) == ("finished" if way == "called" else "killed", 1)


@pytest.mark.parametrize("interrupt", ["signal.SIGINT", "signal.SIGALRM"])
@pytest.mark.parametrize("finish", ["session.finish(timeout=60)", ""], ids=["called", "at exit"])
def test_ctrl_c_while_finish_waits_says_that_delivery_goes_on(
    tmp_path: Path, interrupt: str, finish: str
) -> None:
    script = f"""
    import threading
    import warnings

    class TimeUp(Exception):
        pass

    def time_is_up(number, frame):
        raise TimeUp

    signal.signal(signal.SIGALRM, time_is_up)
    warnings.simplefilter("default")
    session = memlog.init("mlflow", dir="runs", config={{"memlog": {{"linger": 3}}}})
    print("helper", session._live._helper.pid, flush=True)
    session.step()
    timer = threading.Timer(1, os.kill, (os.getpid(), {interrupt}))
    timer.daemon = True   # Python waits for others before it runs exit handlers
    timer.start()
    {finish}
    """
    process = child.start(PREFACE + script, tmp_path, MLFLOW_TRACKING_URI="http://127.0.0.1:9")
    output, errors = process.communicate(timeout=AT_MOST)
    if interrupt == "signal.SIGINT" and not finish:
        assert "Traceback" not in errors  # there is nothing left that could be interrupted
    else:
        assert ("KeyboardInterrupt" if interrupt == "signal.SIGINT" else "TimeUp") in errors
    [told] = [line for line in errors.splitlines() if "not everything is delivered after" in line]
    assert "delivery continues in the background" in told
    assert "ResourceWarning" not in errors
    expect_no_helper(output)
    [summary] = summaries(tmp_path)
    assert (summary.status, summary.steps) == ("finished", 1)

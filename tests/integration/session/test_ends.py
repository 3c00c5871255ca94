"""Every way to end, signals and Ctrl-C: nothing hangs, and no helper is left behind."""

import os
import re
import signal
import subprocess
import time
from pathlib import Path

import pytest
from click.testing import CliRunner
from support import child
from support.programs import AT_MOST, PREFACE, expect_no_helper, status_and_steps, summaries
from support.truth import plan_of, rows_in_mlflow, rows_of, wait_until_delivered

import memlog
from memlog.cli.sync import sync
from memlog.delivery.helper.postmortem import explain_afterwards
from memlog.delivery.helper.process import ANOTHER_PROGRAM
from memlog.events import End
from memlog.journal import list_runs

pytestmark = pytest.mark.integration

ENDINGS = {
    "no finish": ("s = begin(); s.step()", 0),
    "exit in a block": ("with begin() as s: s.step(); sys.exit(3)", 3),
    "an error": ("s = begin(); s.step(); raise ValueError", 1),
    "os._exit": ("s = begin(); s.step(); os._exit(0)", 0),
    "an abort": ("s = begin(); s.step(); os.abort()", -6),
}
STATUSES = {
    "exit in a block": "failed",
    "an error": "failed",
    "os._exit": "killed",
    "an abort": "killed",
}


@pytest.mark.parametrize("how", ENDINGS)
def test_every_way_to_end_gives_one_run_with_its_status(tmp_path: Path, how: str) -> None:
    script, code = ENDINGS[how]
    found = status_and_steps(tmp_path, f"\n    {script}\n", code)
    assert found == [(STATUSES.get(how, "finished"), 1)]


def test_a_run_ends_where_its_process_becomes_another_program(tmp_path: Path) -> None:
    """The new program keeps the process's id and start time, and nothing else."""
    script = """
    session = begin()
    session.step()
    print(os.read(0, 1), flush=True)
    os.execv("/bin/sh", ["sh", "-c", "echo another; read end"])
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
    ends = [event for event in folder.events() if isinstance(event, End)]
    assert [end.reason for end in ends] == [ANOTHER_PROGRAM]
    explain_afterwards(folder)
    assert summaries(tmp_path)[0].alerts == []


def test_sync_explains_no_end_while_the_helper_is_at_work(tmp_path: Path) -> None:
    """The live run looks dead: the clock was set, and the journal has only a start time by the clock."""
    script = """
    import psutil
    from memlog.journal import format
    from memlog.journal.format import Birth

    known = psutil.Process.create_time
    psutil.Process.create_time = lambda self: known(self) - 60
    format.own_birth = Birth  # every field is unknown
    session = begin(config={"quiet": True})
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
    result = CliRunner().invoke(sync, [folder.id, "--dir", str(tmp_path / "runs")])
    assert "recorded for no tracker" in str(result.exception)
    assert not folder.artifacts.exists()
    assert not process.communicate(timeout=AT_MOST)[1]
    expect_no_helper(helper)
    [run] = summaries(tmp_path)
    assert (run.status, run.alerts, run.artifacts) == ("finished", [], [])


SIGNALS = {
    "its own SIGINT handler": (
        "signal.signal(signal.SIGINT, lambda *_: (print('saved'), sys.exit(7)))",
        signal.SIGINT,
        7,
        "finished",
    ),
    "no handler, SIGTERM": ("print('saved')", signal.SIGTERM, -signal.SIGTERM, "killed"),
    "no handler, SIGINT": ("print('saved')", signal.SIGINT, -signal.SIGINT, "killed"),
    # As at an end without an answer from the helper process, when memlog imports modules with dataclasses.
    "code compiled at exit, SIGINT": (
        "atexit.register(lambda: eval(\"print('saved')\"))",
        signal.SIGINT,
        -signal.SIGINT,
        "killed",
    ),
}


@pytest.mark.parametrize("how", SIGNALS)
def test_signals_do_what_the_user_had_them_do(tmp_path: Path, how: str) -> None:
    prepare, number, code, status = SIGNALS[how]
    script = f"""
    import atexit

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
    printed = ""
    while "ready" not in printed:
        printed += process.stdout.readline()
    process.send_signal(number)
    output, errors = process.communicate(timeout=AT_MOST)
    assert process.returncode == code, errors
    assert "saved" in printed + output
    expect_no_helper(printed + output)
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


def catches_sigterm(pid: int) -> bool:
    status = Path(f"/proc/{pid}/status").read_text()
    (caught,) = re.findall(r"^SigCgt:\s*(\w+)$", status, re.MULTILINE)
    return bool(int(caught, 16) >> (signal.SIGTERM - 1) & 1)


@pytest.mark.usefixtures("ready_store")
def test_preemption_leaves_time_to_flush(tmp_path: Path) -> None:
    """The trainer and the helper get SIGTERM before MLflow has any data."""
    process = child.start(PREFACE + PREEMPTED, tmp_path)
    assert process.stdout is not None
    helper = int(process.stdout.readline().split()[1])
    assert process.stdout.readline() == "ready\n"
    [run] = list_runs(tmp_path / "runs")
    deadline = time.monotonic() + AT_MOST
    while not catches_sigterm(helper):
        assert time.monotonic() < deadline
        time.sleep(0.01)
    os.kill(helper, signal.SIGTERM)
    process.terminate()
    process.communicate(timeout=AT_MOST)
    own = wait_until_delivered(tmp_path / "runs", seconds=AT_MOST).own_run
    assert own is not None
    rows = rows_in_mlflow(f"sqlite:///{tmp_path}/mlflow.db", own.run_id)
    assert rows == rows_of(plan_of(run))


TRAINING = {
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
    """The traceback and the exit code are those of the first Ctrl-C."""
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
    [line] = [line for line in errors.splitlines() if "not everything is delivered after" in line]
    assert "`memlog sync " in line
    expect_no_helper(output)
    [summary] = summaries(tmp_path)
    assert (summary.status, summary.steps) == ("finished" if way == "called" else "killed", 1)


@pytest.mark.parametrize(
    ("interrupt", "finish"),
    [("signal.SIGINT", ""), ("signal.SIGALRM", "session.finish(timeout=60)")],
    ids=["Ctrl-C at exit", "an alarm in finish"],
)
def test_an_interrupted_finish_says_that_delivery_goes_on(
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
    # At exit there is nothing left that could be interrupted.
    assert ("TimeUp" in errors, "Traceback" in errors) == (bool(finish), bool(finish))
    [line] = [line for line in errors.splitlines() if "not everything is delivered after" in line]
    assert "delivery continues in the background" in line
    assert "ResourceWarning" not in errors
    expect_no_helper(output)
    [summary] = summaries(tmp_path)
    assert (summary.status, summary.steps) == ("finished", 1)

"""An empty run prints that nothing was recorded and what to call. Other runs print no such line."""

import os
import subprocess
import sys
import time
from pathlib import Path

import pytest
from click.testing import CliRunner

from memlog.cli.show import show

pytestmark = pytest.mark.integration

WHY = "memlog: nothing was recorded, because memlog noticed no optimizer step: call "
INIT = "import memlog\nsession = memlog.init('local', config={'quiet': True})\n"
WORK = "\nimport time\nwhile time.process_time() < 1.2: pass\n"
"""A program that computes for less than a second has trained nothing."""
REMEDIES = ("session.step() after each step", "monitors", "memlog_keras", "memlog.watch_loss")


LAUNCHER = (sys.executable, "-m", "memlog", "run", "--")


def ran(tmp_path: Path, body: str, *launcher: str, argument: str = "", code: int = 0) -> list[str]:
    """Return memlog's last lines in the output of a script without torch."""
    script = tmp_path / "script.py"
    script.write_text(body)
    done = subprocess.run(
        [*launcher, sys.executable, str(script), *filter(None, (argument,))],
        env={**os.environ, "MEMLOG_DIR": str(tmp_path / "runs")},
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert not launcher or done.returncode == code, done.stderr
    return [line for line in done.stderr.splitlines() if line.startswith("memlog: ")]


def shown(tmp_path: Path) -> str:
    result = CliRunner().invoke(show, ["latest", "--dir", str(tmp_path / "runs")])
    assert result.exit_code == 0
    return " ".join(result.output.split())


def test_a_script_without_torch_and_steps_gets_a_hint(tmp_path: Path) -> None:
    (line,) = ran(tmp_path, INIT + WORK)
    assert line.startswith(WHY)
    assert all(remedy in line for remedy in REMEDIES)
    page = shown(tmp_path)
    assert "recorded nothing: memlog noticed no optimizer step in this process" in page
    assert "If its child processes train" in page
    assert all(remedy in page for remedy in REMEDIES)


@pytest.mark.parametrize("end", ["raise SystemExit(0)", "raise SystemExit('no such file')", ""])
def test_a_program_that_ends_early_gets_no_hint(tmp_path: Path, end: str) -> None:
    assert ran(tmp_path, INIT + end) == []


def test_a_loop_with_a_data_loaders_workers_is_not_told_of_children(tmp_path: Path) -> None:
    loop = """
import torch

weight = torch.nn.Parameter(torch.zeros(3))
data = torch.utils.data.TensorDataset(torch.ones(8, 3))
for (x,) in torch.utils.data.DataLoader(data, num_workers=1, multiprocessing_context="fork"):
    (x @ weight).sum().backward()
    weight.data -= 0.1 * weight.grad
"""
    (line,) = ran(tmp_path, INIT + loop)
    assert line.startswith(WHY)
    assert "child" not in line


def test_a_program_that_evaluates_with_a_data_loaders_workers_gets_no_hint(tmp_path: Path) -> None:
    loop = """
import torch

model = torch.nn.Linear(3, 1)
data = torch.utils.data.TensorDataset(torch.ones(8, 3))
with torch.no_grad():
    for (x,) in torch.utils.data.DataLoader(data, num_workers=1, multiprocessing_context="fork"):
        model(x)
"""
    assert ran(tmp_path, INIT + loop) == []


def test_a_process_with_child_processes_is_told_that_they_are_not_recorded(tmp_path: Path) -> None:
    children = """
import multiprocessing

context = multiprocessing.get_context("fork")
for _ in range(2):
    child = context.Process(target=print)
    child.start()
    child.join()
"""
    (line,) = ran(tmp_path, INIT + children)
    assert "It has started 2 child processes: if they train" in line
    assert "memlog.init()" in line
    assert "`memlog run`" in line
    assert "Keras" not in line


def test_a_process_with_programs_that_worked_is_told_that_they_are_not_recorded(
    tmp_path: Path,
) -> None:
    work = "import time\nwhile time.process_time() < 1.2: pass"
    program = f"\nimport subprocess, sys\nsubprocess.run([sys.executable, '-c', {work!r}])\n"
    (line,) = ran(tmp_path, INIT + program)
    assert "It has started other programs: if they train" in line
    assert "`memlog run`" in line


def test_a_process_that_forked_is_told_that_its_child_processes_are_not_recorded(
    tmp_path: Path,
) -> None:
    forks = """
import os, time

if os.fork() == 0:
    while time.process_time() < 1.2: pass
    os._exit(0)
os.wait()
"""
    (line,) = ran(tmp_path, INIT + forks)
    assert "It has started child processes: if they train" in line


def test_a_process_whose_child_is_recorded_gets_no_hint(tmp_path: Path) -> None:
    child = """
import multiprocessing

def train():
    memlog.init("local", config={"quiet": True}).step()

child = multiprocessing.get_context("fork").Process(target=train)
child.start()
child.join()
"""
    assert ran(tmp_path, INIT + child) == []


def test_a_run_without_a_step_opens_no_run_in_a_tracker(tmp_path: Path) -> None:
    """A parameter and a health event alone are no content; a file of the user's is."""
    folder = f"\nimport os\nos.environ['TENSORBOARD_LOGGING_DIR'] = {str(tmp_path / 'tb')!r}\n"
    script = folder + INIT.replace("'local'", "'tensorboard'") + WORK
    assert [line[:32] for line in ran(tmp_path, script)] == [WHY[:32]]
    assert not (tmp_path / "tb").exists()
    until = time.monotonic() + 60  # the program does not wait for its helper process
    while "the rest" in shown(tmp_path) and time.monotonic() < until:
        time.sleep(0.1)
    assert "the rest" not in shown(tmp_path)
    ran(tmp_path, script + "session.save_artifact(__file__)")
    assert list((tmp_path / "tb").iterdir())


@pytest.mark.parametrize(
    "used",
    [
        "session.step()",
        "memlog.watch_loss(lambda x: x)(2.0)",
        "session.save_artifact(__file__)",
        "with memlog.track_memory('loading'): pass",
        "monitor = memlog.EpochMemoryMonitor(); monitor.on_epoch_start(); monitor.on_epoch_end()",
    ],
    ids=["step", "evaluation", "artifact", "scope", "epoch"],
)
def test_a_run_with_data_gets_no_hint(tmp_path: Path, used: str) -> None:
    assert ran(tmp_path, f"{INIT}{used}\n") == []
    assert "recorded nothing" not in shown(tmp_path)


def test_a_failed_script_gets_no_hint(tmp_path: Path) -> None:
    assert ran(tmp_path, f"{INIT}raise ValueError\n") == []
    assert "recorded nothing" not in shown(tmp_path)


def test_a_call_for_help_gets_no_hint(tmp_path: Path) -> None:
    usage = "import argparse\nargparse.ArgumentParser().parse_args()\n"
    assert ran(tmp_path, INIT + usage, argument="--help") == []


def test_an_exception_that_is_raised_past_finish_gets_no_hint(tmp_path: Path) -> None:
    body = "\nimport torch\ntry:\n    torch.nn.Linear(4, 4)(torch.ones(3, 5)).sum().backward()\n"
    assert ran(tmp_path, f"{INIT}{body}finally:\n    memlog.finish()\n") == []
    body = body.replace("(3, 5)", "(3, 4)") + "finally:\n    memlog.finish()\n"
    assert ran(tmp_path, INIT + body)[0].startswith(WHY)


def test_a_call_for_help_waits_for_no_delivery(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("MLFLOW_TRACKING_URI", f"sqlite:///{tmp_path}/store.db")
    usage = "import argparse\nargparse.ArgumentParser().parse_args()\n"
    begin = "import memlog\nmemlog.init('mlflow')\n"
    assert ran(tmp_path, begin + usage, argument="--help") == []


def test_the_launcher_says_it_of_a_script_that_calls_nothing(tmp_path: Path) -> None:
    (line,) = ran(tmp_path, "print('done')\n", *LAUNCHER)
    assert line.startswith(f"{WHY}session = memlog.init() in the script and session.step() after")
    assert all(remedy in line for remedy in REMEDIES)
    (line,) = ran(tmp_path, INIT + WORK, *LAUNCHER)
    assert line.startswith(WHY)


def test_the_launcher_says_nothing_of_a_script_that_ended_before_its_first_step(
    tmp_path: Path,
) -> None:
    usage = "import argparse\nargparse.ArgumentParser().parse_args()\n"
    assert ran(tmp_path, usage, *LAUNCHER, argument="--help") == []
    assert ran(tmp_path, "raise ValueError\n", *LAUNCHER, code=1) == []
    assert ran(tmp_path, "raise KeyboardInterrupt\n", *LAUNCHER, code=-2) == []


@pytest.mark.parametrize("launcher", [(), LAUNCHER], ids=["init", "memlog run"])
def test_a_program_that_computed_no_gradient_gets_no_hint(
    tmp_path: Path, launcher: tuple[str, ...]
) -> None:
    pytest.importorskip("torch")
    early = "import torch\nraise SystemExit(0)\n"
    by_hand = "import torch\nw = torch.ones(2, requires_grad=True)\nw.sum().backward()\n"
    begun = "" if launcher else INIT
    assert ran(tmp_path, begun + early, *launcher) == []
    (line,) = ran(tmp_path, begun + by_hand, *launcher)
    assert line.startswith(WHY)

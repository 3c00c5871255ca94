"""A run that something kills is judged as one that ends: the first line says that memory grew, and why."""

import time
from pathlib import Path

import pytest
from click.testing import CliRunner
from support import child

from memlog.cli.main import cli
from memlog.events import Alert
from memlog.journal import RunDirectory, list_runs
from memlog.reports import summarize
from memlog.reports.page import html
from memlog.reports.page.facts import RunReader

SCRIPT = """
import os, signal, sys, time, torch, memlog
from torch import nn
torch.set_num_threads(1)
model = nn.Sequential(nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 10))
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
steps, how = int(sys.argv[1]), sys.argv[2]
memlog.init("local")
kept = []
for step in range(steps):
    loss = model(torch.randn(8, 64)).square().mean()
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    time.sleep(float(sys.argv[3]))
    if how != "healthy":
        kept.append(torch.ones(2, 512, 512))
if how == "raise":
    raise MemoryError("made up")
if how == "exit":
    os._exit(1)
os.kill(os.getpid(), signal.SIGTERM if how == "term" else signal.SIGKILL)
"""
NAMED = "`kept`, a list in `__main__` (train.py:17), gains one tensor per step"


def ended(folder: Path, steps: int, how: str, pause: str = "0") -> RunDirectory:
    """Run the script until it dies, and wait until its helper process has ended."""
    process = child.start(SCRIPT, folder, str(steps), how, pause, OMP_NUM_THREADS="1")
    process.communicate(timeout=120)
    (run,) = list_runs(folder / "memlog_runs")
    deadline = time.monotonic() + 60
    while time.monotonic() < deadline and not (run.artifacts / "postmortem.md").exists():
        time.sleep(0.1)
    return run


def first_line(run: RunDirectory) -> str:
    shown = CliRunner().invoke(cli, ["show", run.id, "--dir", str(run.path.parent)])
    return shown.output.splitlines()[0]


@pytest.mark.parametrize("how", ["kill", "term", "exit", "raise"])
def test_the_cause_is_named_everywhere(tmp_path: Path, how: str) -> None:
    run = ended(tmp_path, 120, how)
    line, report = first_line(run), (run.artifacts / "postmortem.md").read_text("utf-8")
    assert NAMED in line
    assert "Memory grows by 2." in line
    assert line.startswith("Out of memory" if how == "raise" else "Ended unexpectedly")
    assert NAMED in report
    assert "Nothing points to memory" not in report
    titles = [event.title for event in run.events() if isinstance(event, Alert)]
    assert sum(NAMED in title for title in titles) == 1
    assert "kept" in html(RunReader(run))


@pytest.mark.parametrize("pause", ["0", "0.02"])
def test_a_short_run_names_the_cause(tmp_path: Path, pause: str) -> None:
    """Also if the helper process follows the steps from the beginning."""
    run = ended(tmp_path, 40, "kill", pause)
    line, report = first_line(run), (run.artifacts / "postmortem.md").read_text("utf-8")
    assert line.startswith("Ended unexpectedly after step 39. ")
    assert NAMED in line
    assert line.partition(". ")[2] in report


def test_a_healthy_run_that_is_killed_is_accused_of_nothing(tmp_path: Path) -> None:
    run = ended(tmp_path, 120, "healthy")
    summary = summarize(run)
    assert summary.findings == []
    assert summary.outcome in ("steady", "unsure")

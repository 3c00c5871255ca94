"""Run ``memlog run`` as a user does, and read the journals of the processes that it started."""

import os
import subprocess
import sys
import textwrap
from dataclasses import dataclass
from pathlib import Path

from memlog.events import Batch, End, Event, Parameters, Run
from memlog.journal import RunDirectory, list_runs

MEMLOG_RUN = (sys.executable, "-m", "memlog", "run")
TIMEOUT = 240

TRAIN = """
    import atexit
    import gc
    atexit.register(gc.freeze)  # else its end takes a second: a search through all objects of torch

    import torch

    def train(steps):
        torch.manual_seed(0)
        model = torch.nn.Linear(8, 8)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
        for _ in range(steps):
            model(torch.ones(4, 8)).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
"""
"""The beginning of a script that knows nothing of memlog."""


def write(directory: Path, text: str, name: str = "train.py") -> Path:
    path = directory / name
    path.write_text(textwrap.dedent(text))
    return path


def environment(**more: str) -> dict[str, str]:
    """Return this process's environment without settings of memlog and of trackers."""
    leaks = ("MLFLOW_", "MEMLOG_")
    return {k: v for k, v in os.environ.items() if not k.startswith(leaks)} | more


def start(
    directory: Path, *command: str, options: tuple[str, ...] = (), **more: str
) -> "subprocess.Popen[bytes]":
    return subprocess.Popen(
        [*MEMLOG_RUN, *options, "--", *command],
        cwd=directory,
        env=environment(**more),
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
    )


@dataclass(frozen=True)
class Done:
    code: int
    out: str
    err: str


def launch(
    directory: Path,
    *command: str,
    options: tuple[str, ...] = (),
    stdin: bytes = b"",
    code: int | None = 0,
    **more: str,
) -> Done:
    """Run a command below ``memlog run`` to its end. Unless ``code`` is ``None``, check the exit code."""
    with start(directory, *command, options=options, **more) as process:
        try:
            out, err = process.communicate(stdin, timeout=TIMEOUT)
        finally:
            process.kill()
    assert code is None or process.returncode == code, err.decode()
    return Done(process.returncode, out.decode(), err.decode())


@dataclass(frozen=True)
class Recorded:
    directory: RunDirectory
    events: tuple[Event, ...]

    @property
    def steps(self) -> list[int]:
        return [event.step for event in self.events if isinstance(event, Batch)]

    @property
    def parameters(self) -> dict[str, str]:
        found = [event.values for event in self.events if isinstance(event, Parameters)]
        return found[0] if found else {}

    @property
    def name(self) -> str | None:
        return next(event.name for event in self.events if isinstance(event, Run))

    @property
    def status(self) -> str | None:
        ends = [event.status for event in self.events if isinstance(event, End)]
        return ends[-1] if ends else None


def recorded(directory: Path) -> list[Recorded]:
    """Runs recorded below a folder, the oldest first."""
    return [Recorded(run, tuple(run.events("trainer"))) for run in list_runs(directory)]

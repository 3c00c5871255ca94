"""Measure the cost of occasional tracing over many steps, for one model, in a separate process.

Two processes with the same work can differ by a few per cent, which is more than the cost to measure. So one
process trains alternating blocks with and without memlog. During a bare block, memlog's hooks are removed
from torch, and its clocks stop.
"""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import msgspec
import torch

import memlog
from benchmarks.layer_models import Training
from benchmarks.statistics import Estimate, estimate, ratio_of_sums
from memlog.autolog.optimizer_steps import listen

BLOCK = 5
"""Number of steps in a block."""


class Block(msgspec.Struct, frozen=True):
    """Time that the steps of one block took.

    Attributes:
        wall: Wall-clock seconds.
        processor: Seconds of processor time of this process.
    """

    wall: float
    processor: float


class Outcome(msgspec.Struct, frozen=True):
    """Time that all steps took.

    Attributes:
        bare: Blocks without memlog.
        memlog: Blocks with memlog; each one is next to the bare block of the same index.
        setting_up: The first block with memlog, in which tracing is set up. It is not in `memlog`.
        traced: Numbers of the traced steps.
        tracing_cost: Seconds spent on tracing, as measured by memlog itself, without the time of setting up.
    """

    bare: list[Block]
    memlog: list[Block]
    setting_up: Block
    traced: list[int]
    tracing_cost: float

    @property
    def steps(self) -> int:
        """Number of steps with memlog."""
        return BLOCK * len(self.memlog)

    @property
    def step_ms(self) -> float:
        """Mean milliseconds of a step with memlog."""
        return sum(block.wall for block in self.memlog) / self.steps * 1e3

    @property
    def added_ms(self) -> float:
        """Milliseconds by which a step with memlog is slower than a bare one, on average."""
        return self.step_ms - sum(block.wall for block in self.bare) / self.steps * 1e3

    @property
    def ratio(self) -> Estimate:
        """Time with memlog divided by time without it, over all steps except those of setting up."""
        return ratio_of_sums([b.wall for b in self.memlog], [b.wall for b in self.bare])

    def details(self) -> str:
        """Return a paragraph with the figures that are not in the table."""
        pairs = list(zip(self.memlog, self.bare, strict=True))
        work = ratio_of_sums([a.processor for a, _ in pairs], [b.processor for _, b in pairs])
        neighbours = estimate([mine.wall / other.wall for mine, other in pairs])
        bare = [block.wall for block in self.bare]
        set_up = self.setting_up.wall - sum(bare) / len(bare)
        later = [step for step in self.traced if step >= BLOCK]
        return (
            f"Within its budget: setting up took {set_up:.2f} s more than {BLOCK} bare steps. Of the "
            f"{self.steps} steps after that, {len(later)} were traced ({', '.join(map(str, later))}), which "
            f"cost {self.tracing_cost / sum(bare):.1%} of the time by memlog's own measurement. The "
            f"processor time was {work.format(3)} times that of the bare steps. The median block of {BLOCK} "
            f"steps took {neighbours.format(3)} times its bare neighbour's time."
        )


def measure(model: str, device: str, steps: int) -> Outcome:
    """Train a model in a new process.

    Args:
        model: Name of the model in `benchmarks.layer_models`.
        device: ``cpu`` or ``cuda``.
        steps: Number of steps with memlog; the same number runs without it.
    """
    root = str(Path(__file__).resolve().parents[1])
    clean = {k: v for k, v in os.environ.items() if not k.startswith("MEMLOG_")}
    with tempfile.TemporaryDirectory(prefix="memlog-benchmark-") as directory:
        done = subprocess.run(
            [sys.executable, "-m", "benchmarks.budget", model, device, str(steps)],
            cwd=directory,
            env={**clean, "PYTHONPATH": root},
            stdout=subprocess.PIPE,
            check=True,
        )
    return msgspec.json.decode(done.stdout, type=Outcome)


class Pause:
    """Temporary removal of a session from the training loop. It uses private attributes of the session."""

    def __init__(self, session: memlog.Session) -> None:
        assert session._live is not None
        assert session._live._scheduler is not None
        self._recording = session._live
        self._scheduler = session._live._scheduler
        self._waited = False
        self._since = 0.0

    def tracing_cost(self) -> float:
        """Return the seconds spent on tracing, as `memlog show` prints them."""
        return self._scheduler.costs.budget.spent

    def begin(self) -> None:
        """Remove all hooks of memlog from torch."""
        self._since = time.perf_counter()
        self._recording._autolog.remove()
        self._waited = self._scheduler._waiter.waiting
        self._scheduler._waiter.stop()
        if self._scheduler._subscription is not None:
            self._scheduler._subscription.remove()
            self._scheduler._subscription = None  # the next window makes a new one

    def end(self) -> None:
        """Restore the hooks, and set memlog's clocks as if no time had passed."""
        self._recording._autolog = listen(self._recording.batches.optimizer_stepped)
        if self._waited:
            self._scheduler._waiter.start()
        passed = time.perf_counter() - self._since
        costs = self._scheduler.costs
        if costs.budget._started is not None:
            costs._step_began += passed
            costs.budget._started += passed


def train(model: str, device: str, steps: int) -> Outcome:
    """Run alternating blocks with and without memlog."""
    torch.set_num_threads(1)
    training = Training(model, device)
    block(training, 2)  # not measured: the optimizer's state, torch's own caches
    session = memlog.init("local", model=training.model, layers=True)
    assert session.directory is not None
    pause = Pause(session)
    setting_up = block(training, BLOCK)
    bare, ours = [], []
    for number in range(steps // BLOCK):
        if number % 2:
            ours.append(block(training, BLOCK))
        pause.begin()
        bare.append(block(training, BLOCK))
        pause.end()
        if not number % 2:
            ours.append(block(training, BLOCK))
    memlog.finish()
    return Outcome(bare, ours, setting_up, traced(session.directory), pause.tracing_cost())


def block(training: Training, steps: int) -> Block:
    """Train some steps and measure their time."""
    begun, worked = time.perf_counter(), time.process_time()
    for _ in range(steps):
        training.step()
    return Block(time.perf_counter() - begun, time.process_time() - worked)


def traced(directory: Path) -> list[int]:
    """Return the numbers of the traced steps."""
    from memlog.events import Trace
    from memlog.journal import RunDirectory

    entries = (entry for file in RunDirectory(directory).files() for entry in file.read())
    events = (entry.event for entry in entries)
    return [event.step for event in events if isinstance(event, Trace) and event.step is not None]


if __name__ == "__main__":
    outcome = train(sys.argv[1], sys.argv[2], int(sys.argv[3]))
    sys.stdout.write(msgspec.json.encode(outcome).decode())

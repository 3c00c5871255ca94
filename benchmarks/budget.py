"""What tracing now and then costs over many steps, for one model, in a process of its own.

Two processes that do the same may be some percent apart, more than what is to be measured. So one process
trains with memlog and bare by turns, block by block; for the bare blocks memlog's hooks are taken out of
torch, and its clocks stand still.
"""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import msgspec
import torch

import memlog
from benchmarks.layer_models import Training
from benchmarks.statistics import Estimate, estimate, ratio_of_sums
from memlog.autolog.optimizer_steps import listen

BLOCK = 5
"""Steps."""


class Block(msgspec.Struct, frozen=True):
    """What some steps took.

    Attributes:
        wall: Seconds by the clock.
        processor: Seconds of this process's own work: another's on the same machine is not in it.
    """

    wall: float
    processor: float


class Outcome(msgspec.Struct, frozen=True):
    """What all steps took.

    Attributes:
        bare: The blocks without memlog.
        memlog: The block beside each, with it.
        setting_up: The first block with memlog, which is none of those: tracing is set up in it.
        traced: The traced steps' numbers.
        said: Seconds that tracing has cost by its own account, without setting up.
    """

    bare: list[Block]
    memlog: list[Block]
    setting_up: Block
    traced: list[int]
    said: float

    @property
    def steps(self) -> int:
        """Those with memlog."""
        return BLOCK * len(self.memlog)

    @property
    def step_ms(self) -> float:
        """A step's mean with memlog."""
        return sum(block.wall for block in self.memlog) / self.steps * 1e3

    @property
    def added_ms(self) -> float:
        """By so much that is more than a bare one's."""
        return self.step_ms - sum(block.wall for block in self.bare) / self.steps * 1e3

    @property
    def ratio(self) -> Estimate:
        """Of all steps but those of setting up: the traced ones are among them."""
        return ratio_of_sums([b.wall for b in self.memlog], [b.wall for b in self.bare])

    def told(self) -> str:
        """What does not fit into the table."""
        pairs = list(zip(self.memlog, self.bare, strict=True))
        work = ratio_of_sums([a.processor for a, _ in pairs], [b.processor for _, b in pairs])
        bare = [block.wall for block in self.bare]
        set_up = self.setting_up.wall - sum(bare) / len(bare)
        later = [step for step in self.traced if step >= BLOCK]
        return (
            f"Within its budget: setting up took {set_up:.2f} s more than {BLOCK} bare steps; of the "
            f"{self.steps} steps after that {len(later)} were traced ({', '.join(map(str, later))}), which "
            f"by memlog's own account cost {self.said / sum(bare):.1%} of the time. The process's processor "
            f"time was {work.format(3)} times the bare steps'; the median block of {BLOCK} steps took "
            f"{estimate([mine.wall / other.wall for mine, other in pairs]).format(3)} times its bare "
            "neighbour."
        )


def measure(model: str, device: str, steps: int) -> Outcome:
    """Trains a model in a new process.

    Args:
        model: By its name in `benchmarks.layer_models`.
        device: ``cpu`` or ``cuda``.
        steps: With memlog, and as many bare.
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
    """A session whose part in a loop is taken out for a while. It knows its parts by their private names."""

    def __init__(self, session: memlog.Session) -> None:
        recording: Any = session._live
        self._recording = recording
        self._tracer = recording._tracer
        self._waited = False
        self._since = 0.0

    def tracing_cost(self) -> float:
        """Seconds, as `memlog show` tells them."""
        spent, _ = self._tracer.cost()
        return float(spent)

    def begin(self) -> None:
        """From here on torch has no hook of memlog's."""
        self._since = time.perf_counter()
        self._recording._autolog.remove()
        self._waited = self._tracer._calls is not None
        self._tracer._stop_listening()
        if self._tracer._held is not None:
            self._tracer._held.remove()
            self._tracer._held = None  # taken again as the next window opens

    def end(self) -> None:
        """From here on all is as before, and no time has passed."""
        self._recording._autolog = listen(self._recording.batches.optimizer_stepped)
        if self._waited:
            self._tracer._wait_for_a_call()
        passed = time.perf_counter() - self._since
        if self._tracer._budget is not None:
            self._tracer._stepped += passed
            self._tracer._budget._begun += passed


def train(model: str, device: str, steps: int) -> Outcome:
    """Both loops, by turns."""
    torch.set_num_threads(1)
    training = Training(model, device)
    block(training, 2)  # not counted: the optimizer's state, torch's own caches
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
    begun, worked = time.perf_counter(), time.process_time()
    for _ in range(steps):
        training.step()
    return Block(time.perf_counter() - begun, time.process_time() - worked)


def traced(directory: Path) -> list[int]:
    """The numbers of the steps that were."""
    from memlog.events import Trace
    from memlog.journal import RunDirectory

    entries = (entry for file in RunDirectory(directory).files() for entry in file.read())
    events = (entry.event for entry in entries)
    return [event.step for event in events if isinstance(event, Trace) and event.step is not None]


if __name__ == "__main__":
    outcome = train(sys.argv[1], sys.argv[2], int(sys.argv[3]))
    sys.stdout.write(msgspec.json.encode(outcome).decode())

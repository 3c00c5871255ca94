"""Solution of exercise 02, memory profiling: with CUDA's counters on a GPU, with memlog's tracer on the CPU.

python examples/memory_exercise.py             # all four parts, and the questions answered from the run
python examples/memory_exercise.py phases      # some: profile, snapshot, phases, compare

Files go to the working directory: ``memory_snapshot.pkl``, its picture ``memory.html``, and ``memlog_runs``.
"""

# PyTorch leaves some of these without types.
# mypy: allow-untyped-calls

from __future__ import annotations

import argparse
import json
import pickle
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.profiler import ProfilerActivity, profile
from torch.utils.checkpoint import checkpoint

import memlog
from memlog.artifacts.snapshots import draw_snapshot

CUDA = torch.cuda.is_available()
DEVICE = "cuda" if CUDA else "cpu"
WIDTH, TOKENS = 128, 32
BATCH = 1024 if CUDA else 64
"""Samples. A GPU's peaks include cuBLAS's workspaces (16 to 64 MiB), beside which few samples save little."""
STEPS = 30
ROUNDS, STEPS_A_ROUND = 8, 3
"""Rounds in which times are measured, and steps of each configuration in one round."""
MIB = 1024**2
ENOUGH = 0.30
"""Share of memory that the exercise asks to save."""


class Block(nn.Module):
    """MLP of a transformer's layer."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.up = nn.Linear(WIDTH, 4 * WIDTH)
        self.down = nn.Linear(4 * WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = x + self.down(functional.gelu(self.up(self.norm(x))))
        return out


class Model(nn.Module):
    """Model of three blocks."""

    def __init__(self) -> None:
        super().__init__()
        self.block1 = Block()
        self.block2 = Block()
        self.block3 = Block()

    def forward(self, x: Tensor) -> Tensor:
        x = self.block1(x)
        x = self.block2(x)
        out: Tensor = self.block3(x)
        return out


class CheckpointedModel(Model):
    """The same model; its first two blocks keep only their inputs and run again in the backward pass."""

    def forward(self, x: Tensor) -> Tensor:
        x = checkpoint(self.block1, x, use_reentrant=False)
        x = checkpoint(self.block2, x, use_reentrant=False)
        # Checkpointing the last block would save nothing: it would run again at once.
        out: Tensor = self.block3(x)
        return out


class Configuration(NamedTuple):
    """Options of one row of the table."""

    name: str
    checkpointing: bool
    amp: bool


TABLE = (
    Configuration("Baseline", checkpointing=False, amp=False),
    Configuration("+ Checkpointing", checkpointing=True, amp=False),
    Configuration("+ AMP", checkpointing=False, amp=True),
    Configuration("+ Both", checkpointing=True, amp=True),
)


class Training:
    """Training of one configuration: the model learns the output of a fixed random layer for each token.

    float16 on a GPU needs a scaled loss; bfloat16 on a CPU does not.
    """

    def __init__(self, configuration: Configuration = TABLE[0]) -> None:
        torch.manual_seed(0)
        self.model = (CheckpointedModel() if configuration.checkpointing else Model()).to(DEVICE)
        self.optimizer = torch.optim.Adam(self.model.parameters(), lr=3e-3)
        self.amp = configuration.amp
        self.scaler = torch.amp.GradScaler(DEVICE, enabled=self.amp and CUDA)
        self.batch = torch.randn(BATCH, TOKENS, WIDTH, device=DEVICE)
        self.unseen = torch.randn(BATCH, TOKENS, WIDTH, device=DEVICE)
        self.teacher = torch.randn(WIDTH, WIDTH, device=DEVICE) / WIDTH**0.5

    def forward(self) -> Tensor:
        half = torch.float16 if CUDA else torch.bfloat16
        with torch.autocast(DEVICE, dtype=half, enabled=self.amp):
            return self.loss_on(self.batch)

    def loss_on(self, batch: Tensor) -> Tensor:
        return functional.mse_loss(self.model(batch).float(), self.taught(batch))

    def taught(self, batch: Tensor) -> Tensor:
        with torch.autocast(DEVICE, enabled=False):
            return torch.tanh(batch @ self.teacher)

    def backward(self, loss: Tensor) -> None:
        self.scaler.scale(loss).backward()

    def optimize(self) -> None:
        self.scaler.step(self.optimizer)
        self.scaler.update()

    def step(self) -> None:
        self.backward(self.forward())
        self.optimize()
        self.optimizer.zero_grad()

    def accuracy(self) -> float:
        """Return the loss on unseen data, in full precision."""
        with torch.no_grad():
            return self.loss_on(self.unseen).item()

    def untaught(self) -> float:
        """Return the same loss for a model that always returns 0."""
        return self.taught(self.unseen).square().mean().item()


def part_1_profile() -> None:
    """Part 1: which operations allocate, by PyTorch's profiler."""
    training = Training()
    training.step()
    if not CUDA:
        print("There is no GPU: the profiler watches the CPU.")
    # Operations are the CPU's activity on a GPU, too: it allocates, and then launches kernels.
    activities = [ProfilerActivity.CPU, *([ProfilerActivity.CUDA] if CUDA else [])]
    with profile(activities=activities, profile_memory=True, record_shapes=True) as prof:
        training.step()
    column = "self_cuda_memory_usage" if CUDA else "self_cpu_memory_usage"
    print(prof.key_averages().table(sort_by=column, row_limit=8, max_name_column_width=40))


def part_2_snapshot() -> None:
    """Part 2: a snapshot of every allocation, and its picture, drawn here."""
    training, name = Training(), "memory_snapshot.pkl"
    training.step()
    if CUDA:
        torch.cuda.memory._record_memory_history(max_entries=100_000)  # noqa: SLF001 - torch has no public one
        training.step()
        with Path(name).open("wb") as file:
            pickle.dump(torch.cuda.memory._snapshot(), file)  # noqa: SLF001 - see above
        torch.cuda.memory._record_memory_history(enabled=None)  # noqa: SLF001 - see above
    else:
        tracer = memlog.MemoryTracer()
        with tracer.trace(training.model):
            training.step()
        tracer.export_snapshot(name)
    print(f"{draw_snapshot(name, 'memory.html')}: the picture of {name}, which needs no network")
    print(f"As a flame graph of what is held: memlog open {name}")


class Phase(NamedTuple):
    """Memory at the end of a phase in bytes; ``reserved`` is ``None`` without a caching allocator."""

    name: str
    allocated: int
    reserved: int | None
    max_allocated: int

    def gigabytes(self) -> dict[str, float | None]:
        """Return the sizes in GB of 10⁹ bytes, as the exercise prints them."""
        sizes = self._asdict()
        del sizes["name"]
        return {key: None if size is None else size / 1e9 for key, size in sizes.items()}


def measured_phases(training: Training) -> list[Phase]:
    """Measure one step, phase by phase."""
    return _by_cuda(training) if CUDA else _by_tracer(training)


def _by_cuda(training: Training) -> list[Phase]:
    loss: list[Tensor] = []
    phases: dict[str, Callable[[], Any]] = {
        "forward": lambda: loss.append(training.forward()),
        "backward": lambda: training.backward(loss.pop()),
        "optimizer": training.optimize,
        "zero_grad": training.optimizer.zero_grad,
    }
    torch.cuda.reset_peak_memory_stats()
    found = []
    for name, run in phases.items():
        run()
        allocated, reserved = torch.cuda.memory_allocated(), torch.cuda.memory_reserved()
        found.append(Phase(name, allocated, reserved, torch.cuda.max_memory_allocated()))
    return found


def _by_tracer(training: Training) -> list[Phase]:
    tracer = memlog.MemoryTracer()
    with tracer.trace(training.model):
        training.step()
    levels = tracer.get_phase_levels() or {}
    names = {
        "forward": "forward",
        "backward": "backward",
        "optimizer": "optimizer",
        "end": "zero_grad",
    }
    found: list[Phase] = []
    highest = 0
    for phase, level in levels.items():
        highest = max(highest, level.highest)
        if phase in names:
            found.append(Phase(names[phase], level.after, None, highest))
    return found


def where_it_peaks(phases: list[Phase]) -> str:
    """Return the phase in which the peak was reached."""
    peak = max(phase.max_allocated for phase in phases)
    return next(phase.name for phase in phases if phase.max_allocated == peak)


def part_3_phases() -> None:
    """Part 3: the memory after each phase, and the moment of its peak."""
    training = Training()
    training.step()
    first, second = measured_phases(training), measured_phases(training)
    for phase in first:
        print(f"After {phase.name}: {phase.gigabytes()}")
    print(f"The peak lies in: {where_it_peaks(first)}")
    print(
        f"Left behind by a step: {second[-1].allocated - first[-1].allocated} bytes (a leak is more)"
    )


class Row(NamedTuple):
    """Results of one row of the table."""

    name: str
    run: str
    peak: float
    step_ms: float
    loss: float


def train(configuration: Configuration) -> tuple[str, float]:
    """Train with memlog; return the run's id and the loss on unseen data."""
    if CUDA:
        torch.cuda.reset_peak_memory_stats()
    training = Training(configuration)
    training.step()  # leaves torch's one-time set-up out of the measurement
    name, model = configuration.name, training.model
    # memlog traces the first step, and so knows its peak by layer and by purpose.
    with memlog.init("local", name=name, model=model, layers=True) as session:
        for _ in range(STEPS):
            training.step()
    return Path(session.directory or "").name, training.accuracy()


def run_memlog(*arguments: str) -> subprocess.CompletedProcess[str]:
    """Run a command of memlog and return its output."""
    command = [sys.executable, "-m", "memlog", *arguments]
    return subprocess.run(command, check=False, capture_output=True, text=True)  # noqa: S603 - our own


def step_times() -> list[float]:
    """Return each configuration's milliseconds per step: the median over rounds.

    The configurations alternate, so that other load on the machine affects all of them equally. On the CPU
    the processor time of all threads is measured, because wall-clock time includes waiting for other
    programs.
    """
    trainings = [Training(configuration) for configuration in TABLE]
    for training in trainings:
        training.step()
    times: list[list[float]] = [[] for _ in TABLE]
    for _ in range(ROUNDS):
        for training, own in zip(trainings, times, strict=True):
            began = _clock()
            for _ in range(STEPS_A_ROUND):
                training.step()
            own.append((_clock() - began) * 1000 / STEPS_A_ROUND)
    return [statistics.median(own) for own in times]


def _clock() -> float:
    """Return the current time in seconds."""
    if CUDA:
        torch.cuda.synchronize()
        return time.perf_counter()
    return time.process_time()


def fill_in() -> list[Row]:
    """Train each configuration; read the peaks from the comparison of the runs."""
    trained = [train(configuration) for configuration in TABLE]
    figures = json.loads(run_memlog("compare", *(run for run, _ in trained), "--json").stdout)[
        "figures"
    ]
    peaks = figures["device.peak" if CUDA else "trace.peak"]["values"]
    return [
        Row(configuration.name, run, peak, took, loss)
        for configuration, (run, loss), peak, took in zip(
            TABLE, trained, peaks, step_times(), strict=True
        )
    ]


def saved(row: Row, base: Row) -> float:
    return 1 - row.peak / base.peak


def part_4_compare() -> None:
    """Part 4: four ways to train, compared by memlog, and the questions answered."""
    rows = fill_in()
    base, checkpointed, amp, both = rows
    print(f"| {'Configuration':15} | Peak Memory | Saved | Time    |")
    print("|-----------------|-------------|-------|---------|")
    for row in rows:
        share = "" if row is base else f"{saved(row, base):.0%}"
        print(f"| {row.name:15} | {row.peak / MIB:7.1f} MiB | {share:>5} | {row.step_ms:4.0f} ms |")
    print(f"Time: of a step{'' if CUDA else ', on the processor'}; the four alternate.")
    figure = "device.peak" if CUDA else "trace.peak"
    gate = f"{figure} > -{ENOUGH:.0%}"
    done = run_memlog("compare", base.run, checkpointed.run, "--fail-if", gate)
    print(f'\n$ memlog compare {base.run} {checkpointed.run} --fail-if "{gate}"')
    print(done.stdout + done.stderr, end="")
    print(f"exit code {done.returncode}\n")
    predictions(base, {"checkpointing": checkpointed, "precision": amp})
    questions(base, checkpointed, amp, both)


def predictions(base: Row, measured: dict[str, Row]) -> None:
    """Print the predictions of `memlog advise`, which uses only the baseline's trace."""
    print(f"$ memlog advise {base.run}")
    for hint in json.loads(run_memlog("advise", base.run, "--json").stdout)["advice"]["hints"]:
        if hint["kind"] in measured:
            peak = measured[hint["kind"]].peak
            print(f"{hint['what']}: {hint['peak'] / MIB:.1f} MiB (measured: {peak / MIB:.1f})")
    print()


def questions(base: Row, checkpointed: Row, amp: Row, both: Row) -> None:
    """Answer the exercise's four questions from the measurements."""
    training = Training()
    training.step()
    print("1. Where does memory peak (forward or backward)?")
    print(f"   In: {where_it_peaks(measured_phases(training))}.")
    print("2. How much memory does checkpointing save?")
    print(
        f"   {(base.peak - checkpointed.peak) / MIB:.1f} MiB of {base.peak / MIB:.1f}, "
        f"{saved(checkpointed, base):.0%}; with AMP besides {saved(both, base):.0%}."
    )
    print("3. What's the compute overhead of checkpointing?")
    longer = checkpointed.step_ms / base.step_ms - 1
    print(f"   A step takes {longer:+.0%}: {checkpointed.step_ms:.0f} ms for {base.step_ms:.0f}.")
    print("4. Does AMP affect model accuracy?")
    change = f" ({amp.loss / base.loss - 1:+.1%})" if base.loss else ""
    print(
        f"   After {STEPS + 1} steps the loss on unseen data is {amp.loss:.4f} for {base.loss:.4f}{change}."
    )
    print(f"   A model that always returns 0 has {training.untaught():.4f}.")
    wanted = "yes" if saved(checkpointed, base) > ENOUGH else "no"
    print(f"Peak memory reduced by more than {ENOUGH:.0%}: {wanted}")


PARTS: dict[str, Callable[[], None]] = {
    "profile": part_1_profile,
    "snapshot": part_2_snapshot,
    "phases": part_3_phases,
    "compare": part_4_compare,
}


def main() -> None:
    parser = argparse.ArgumentParser(description="Profile the memory of a training.")
    parser.add_argument("parts", nargs="*", metavar="PART", help=f"of {', '.join(PARTS)} (all)")
    chosen = parser.parse_args().parts or list(PARTS)
    for name in chosen:
        if name not in PARTS:
            parser.error(f"there is no part {name!r}; choose from {', '.join(PARTS)}")
    for name in chosen:
        print(f"== {PARTS[name].__doc__}\n")
        PARTS[name]()
        print(flush=True)


if __name__ == "__main__":
    main()

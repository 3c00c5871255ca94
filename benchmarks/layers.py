"""Measure the cost of tracing steps: ``python -m benchmarks.layers [--rounds N] [--write FILE]``."""

# Some of torch's functions used here have no types.
# mypy: allow-untyped-calls

from __future__ import annotations

import argparse
import math
import statistics
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from pathlib import Path
from typing import Any

import psutil
import torch
from rich.console import Console
from rich.progress import track
from torch import nn

import memlog
from benchmarks import budget
from benchmarks.__main__ import machine
from benchmarks.layer_models import MODELS, SMALL, Training
from benchmarks.statistics import Estimate, estimate

Tracing = Callable[[Training], AbstractContextManager[Any]]
"""Function that returns the context manager around one step."""


def bare(_training: Training) -> AbstractContextManager[Any]:
    return nullcontext()


def memlog_every_step(training: Training) -> AbstractContextManager[Any]:
    return memlog.MemoryTracer().trace(training.model)


def torch_profiler(_training: Training) -> AbstractContextManager[Any]:
    return torch.profiler.profile(
        activities=[torch.profiler.ProfilerActivity.CPU], profile_memory=True
    )


@contextmanager
def mem_tracker(training: Training) -> Iterator[None]:
    """Trace with torch's own tracker, used as its documentation shows."""
    from torch.distributed._tools.mem_tracker import MemTracker

    tracker = MemTracker()
    tracker.track_external(training.model, training.optimizer)
    with tracker:
        yield


@contextmanager
def psutil_in_hooks(_training: Training) -> Iterator[None]:
    """Read the resident set when a module begins and when it ends."""
    process = psutil.Process()
    modules = nn.modules.module

    def read(*_: Any) -> None:
        process.memory_info()

    with ExitStack() as stack:
        stack.callback(modules.register_module_forward_pre_hook(read).remove)
        stack.callback(modules.register_module_forward_hook(read).remove)
        yield


WAYS: dict[str, Tracing] = {
    "bare": bare,
    "memlog, every step": memlog_every_step,
    "torch.profiler(profile_memory=True)": torch_profiler,
    "torch's MemTracker": mem_tracker,
    "psutil in every hook": psutil_in_hooks,
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=9, help="blocks of each tracer (default 9)")
    parser.add_argument("--steps", type=int, default=5, help="steps per block (default 5)")
    parser.add_argument(
        "--long", type=int, default=500, help="steps within memlog's budget (default 500)"
    )
    parser.add_argument(
        "--models",
        nargs="+",
        choices=MODELS,
        help="(default: small ones on the CPU, all on a GPU)",
    )
    parser.add_argument("--device", default="cpu", help="cpu or cuda (default cpu)")
    parser.add_argument("--write", type=Path, metavar="FILE", help="also write the tables to FILE")
    options = parser.parse_args()
    torch.set_num_threads(1)
    results = [
        Result(name, options.device, options.rounds, options.steps, options.long)
        for name in options.models or (SMALL if options.device == "cpu" else MODELS)
    ]
    parts = [machine(), *(result.table() for result in results), aims(results)]
    text = "\n\n".join(parts)
    Console(width=120).print(text, markup=False, highlight=False)
    if options.write:
        options.write.write_text(_PREFACE + text + "\n")


_PREFACE = """# What tracing a step costs

Written by `make bench-layers`. All ways of tracing run in interleaved blocks. Each block is compared with the
bare block of the same round. Figures are medians, with an interval that contains the true median with at
least 95 % confidence (from six rounds on). The second row differs, because a traced step there is rare and
expensive. It compares the sum of all its steps with the sum of as many bare steps in the same process, in
alternating blocks. Its interval is a bootstrap interval. The block in which tracing is set up (imports, the
first two traces) is reported below the table. "Added" is the time of a step minus that of a bare step. The
last column is the time that MemTracker adds divided by the time that the row's way adds.

"""


class Result:
    """Measurements of one model under every way of tracing.

    Args:
        name: Name of the model.
        device: Device on which the model trains.
        rounds: Number of blocks of each way.
        steps: Number of steps in a block.
        long: Number of steps with tracing within memlog's budget.
    """

    def __init__(self, name: str, device: str, rounds: int, steps: int, long: int) -> None:
        training = Training(name, device)
        self.title = f"{training.description} on {device}, {rounds} blocks of {steps} steps:"
        self.name = name
        self.medians = medians(training, rounds, steps)
        self.within = budget.measure(name, device, long)

    def added(self, way: str) -> float:
        """Return the milliseconds that a way adds to a bare step, as the median over the rounds."""
        pairs = zip(self.medians[way], self.medians["bare"], strict=True)
        return statistics.median(value - base for value, base in pairs)

    def times_cheaper(self, added: float) -> float:
        """Return the time that MemTracker adds to a step divided by ``added`` milliseconds."""
        return self.added("torch's MemTracker") / added if added > 0 else math.inf

    def table(self) -> str:
        """Return the table in Markdown."""
        rows = [self._row(way) for way in self.medians]
        rows.insert(1, self._row_within())
        lines = [
            "| way | step, ms | step / bare step | added, ms | MemTracker's / this one's |",
            "|---|---|---|---|---|",
            *rows,
        ]
        return "\n".join([self.title, "", *lines, "", self.within.details()])

    def _row(self, way: str) -> str:
        values = self.medians[way]
        ratios = [value / base for value, base in zip(values, self.medians["bare"], strict=True)]
        added = self.added(way)
        than = "" if way == "bare" else _times(self.times_cheaper(added))
        median = estimate(values).median
        return f"| {way} | {median:.2f} | {estimate(ratios).format(3)} | {added:.2f} | {than} |"

    def _row_within(self) -> str:
        within, than = self.within, _times(self.times_cheaper(self.within.added_ms))
        return (
            f"| memlog, within its budget, {within.steps} steps | {within.step_ms:.2f} "
            f"| {within.ratio.format(3)} | {within.added_ms:.2f} | {than} |"
        )


def medians(training: Training, rounds: int, steps: int) -> dict[str, list[float]]:
    """Return each way's block medians, in milliseconds per step."""
    found: dict[str, list[float]] = {way: [] for way in WAYS}
    for tracing in WAYS.values():
        block(training, tracing, 2)  # not measured: imports, scratch space, the optimizer's state
    for number in track(range(rounds), description=training.description, transient=True):
        order = list(WAYS)
        shift = number % len(order)
        for way in order[shift:] + order[:shift]:
            found[way].append(block(training, WAYS[way], steps))
    return found


def aims(results: list[Result]) -> str:
    """Return a table of memlog's aims, with the result of each model."""
    within = [result.within.ratio for result in results]
    times = [result.times_cheaper(result.added("memlog, every step")) for result in results]
    rows = [
        ["aim", *(result.name for result in results)],
        ["---"] * (len(results) + 1),
        ["within its budget at most 1.01 times bare", *map(_below_the_aim, within)],
        [
            "every step: MemTracker adds at least 5 times more",
            *(f"{_times(one)}, {'met' if one >= 5 else 'missed'}" for one in times),
        ],
    ]
    return "\n".join(f"| {' | '.join(row)} |" for row in rows)


def _below_the_aim(ratio: Estimate) -> str:
    verdict = "met" if ratio.median <= 1.01 else "missed"
    if ratio.low <= 1.01 < ratio.high:
        verdict += ", but for the noise"
    return f"{ratio.format(3)}, {verdict}"


def _times(times: float) -> str:
    """Format a factor. An infinite factor means that the added time is below the noise."""
    return f"{times:.1f}" if math.isfinite(times) else "(below the noise)"


def block(training: Training, way: Tracing, steps: int) -> float:
    """Return the median milliseconds of some steps, including the time to start and stop tracing."""
    times = []
    for _ in range(steps):
        begun = time.perf_counter()
        with way(training):
            training.step()
        times.append((time.perf_counter() - begun) * 1e3)
    return statistics.median(times)


if __name__ == "__main__":
    main()

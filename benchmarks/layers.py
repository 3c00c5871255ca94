"""What it costs to trace a step: ``python -m benchmarks.layers [--rounds N] [--write FILE]``."""

# PyTorch leaves some of what is used here without types.
# mypy: allow-untyped-calls

from __future__ import annotations

import argparse
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
from benchmarks.__main__ import machine
from benchmarks.layer_models import MODELS, Training
from benchmarks.statistics import estimate

Tracing = Callable[[Training], AbstractContextManager[Any]]
"""What surrounds one step."""


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
    """The tracker that comes with torch, used as its documentation says."""
    from torch.distributed._tools.mem_tracker import MemTracker

    tracker = MemTracker()
    tracker.track_external(training.model, training.optimizer)
    with tracker:
        yield


@contextmanager
def psutil_in_hooks(_training: Training) -> Iterator[None]:
    """A reading of the resident set as every module begins and ends."""
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
    parser.add_argument("--rounds", type=int, default=9, help="blocks of each way (default 9)")
    parser.add_argument("--steps", type=int, default=5, help="steps a block (default 5)")
    parser.add_argument("--device", default="cpu", help="cpu or cuda (default cpu)")
    parser.add_argument("--write", type=Path, metavar="FILE", help="write the tables there, too")
    options = parser.parse_args()
    torch.set_num_threads(1)
    tables = [table(name, options.device, options.rounds, options.steps) for name in MODELS]
    text = "\n\n".join([machine(), *tables])
    Console(width=120).print(text, markup=False, highlight=False)
    if options.write:
        options.write.write_text(_PREFACE + text + "\n")


_PREFACE = """# What tracing a step costs

Written by `python -m benchmarks.layers`. Blocks are interleaved and each is compared with the bare block of
its own round; medians with an interval that holds the true one with at least 95 % confidence (from six
rounds on).

"""


def table(name: str, device: str, rounds: int, steps: int) -> str:
    """One model under every way of tracing."""
    training = Training(name, device)
    medians: dict[str, list[float]] = {way: [] for way in WAYS}
    for tracing in WAYS.values():
        block(training, tracing, 2)  # not counted: imports, scratch space, the optimizer's state
    for number in track(range(rounds), description=name, transient=True):
        order = list(WAYS)
        shift = number % len(order)
        for way in order[shift:] + order[:shift]:
            medians[way].append(block(training, WAYS[way], steps))
    added = {
        way: statistics.median(
            value - base for value, base in zip(values, medians["bare"], strict=True)
        )
        for way, values in medians.items()
    }
    lines = [
        f"{training.description} on {device}, {rounds} blocks of {steps} steps:\n",
        "| way | step, ms | step / bare step | added, ms | MemTracker's / this one's |",
        "|---|---|---|---|---|",
    ]
    for way, values in medians.items():
        ratios = [value / base for value, base in zip(values, medians["bare"], strict=True)]
        than = added["torch's MemTracker"] / added[way] if added[way] > 0 else float("nan")
        lines.append(
            f"| {way} | {estimate(values).median:.2f} | {estimate(ratios).format(2)} | {added[way]:.2f} "
            f"| {'' if way == 'bare' else f'{than:.1f}'} |"
        )
    return "\n".join(lines)


def block(training: Training, way: Tracing, steps: int) -> float:
    """The median of some steps, in milliseconds, opening and closing included."""
    times = []
    for _ in range(steps):
        begun = time.perf_counter()
        with way(training):
            training.step()
        times.append((time.perf_counter() - begun) * 1e3)
    return statistics.median(times)


if __name__ == "__main__":
    main()

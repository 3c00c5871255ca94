"""Compare estimates with the allocator: ``python -m benchmarks.estimates [--only NAME] [--write FILE]``."""

# PyTorch leaves some of these without types.
# mypy: allow-untyped-calls

from __future__ import annotations

import argparse
import gc
import statistics
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import torch
from rich.console import Console

import memlog
from benchmarks.__main__ import machine
from benchmarks.estimates.models import Case, cases
from benchmarks.estimates.optimizers import OPTIMIZERS
from benchmarks.estimates.pages import put_into
from memlog.estimates.estimate import MARGIN

_STEPS = 10


class Row(NamedTuple):
    """One training: a model, an optimizer, a batch size. Sizes are bytes, times are seconds."""

    name: str
    optimizer: str
    batch: int
    measured: int
    estimated: int
    steps_time: float
    estimate_time: float

    @property
    def error(self) -> float:
        """Relative error of the estimate."""
        return self.estimated / self.measured - 1

    @property
    def fails(self) -> bool:
        """True if a job would have failed with a memory limit of the estimate plus the margin."""
        return self.measured > self.estimated * (1 + MARGIN)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--only", default="", help="models whose name contains this")
    parser.add_argument("--write", type=Path, metavar="FILE", help="put the tables into FILE")
    options = parser.parse_args()
    torch.set_num_threads(1)
    rows = []
    for row in measured(options.only):
        print(f"{row.name}, {row.optimizer}, batch {row.batch}: {row.error:+.2%}", flush=True)
        rows.append(row)
    tables = f"{machine()}\n\n{summary(rows)}\n\n{table(rows)}\n"
    Console().print(tables, markup=False, highlight=False)
    if options.write:
        put_into(options.write, tables, "make estimate-bench")


def measured(only: str) -> Iterator[Row]:
    for at, case in enumerate(one for one in cases() if only in one.name):
        names = list(OPTIMIZERS)
        # Each model trains with two of the four optimizers. The next model begins with the next optimizer.
        for name, batch in zip((names[at % 4], names[(at + 2) % 4]), case.batches, strict=True):
            try:
                yield compared(case, name, batch)
            except memlog.ConfigurationError as error:  # noqa: PERF203 - the others go on
                print(f"{case.name}: refused, because {error}", flush=True)


def compared(case: Case, optimizer: str, batch: int) -> Row:
    """Estimate a training, run it, and measure it."""
    torch.manual_seed(0)
    model = case.model()

    def step(model: Any, optimizer: Any, batch: int) -> None:
        case.loss(model, case.batch(batch)).backward()
        optimizer.step()
        optimizer.zero_grad()

    begun = time.perf_counter()
    found = memlog.estimate(
        step, model=model, optimizer=OPTIMIZERS[optimizer], batch=batch, device="cpu"
    )
    estimate_time = time.perf_counter() - begun

    def train(steps: int) -> None:
        trained = case.model()
        stepped = OPTIMIZERS[optimizer](trained.parameters())
        for _ in range(steps):
            step(trained, stepped, batch)

    begun = time.perf_counter()
    train(_STEPS)  # torch's one-time set-up happens here, not in the measurement of the peak
    steps_time = time.perf_counter() - begun
    return Row(
        case.name, optimizer, batch, peak(lambda: train(2)), found.peak, steps_time, estimate_time
    )


def peak(run: Callable[[], None]) -> int:
    """Return the peak of torch's CPU allocator during a call in bytes, from the profiler's memory events."""
    gc.collect()
    profile: Any = torch.profiler.profile(
        activities=[torch.profiler.ProfilerActivity.CPU], profile_memory=True
    )
    with profile:
        run()
    events = (
        event for event in profile.profiler.kineto_results.events() if event.name() == "[memory]"
    )
    level = highest = 0
    for event in sorted(events, key=lambda event: event.start_ns()):
        level += event.nbytes()
        highest = max(highest, level)
    return highest


def summary(rows: list[Row]) -> str:
    """Return a table with the figures that papers on memory estimates give."""
    errors = sorted(abs(row.error) for row in rows)
    slow = [row.estimate_time / row.steps_time for row in rows]
    return "\n".join(
        [
            "| figure | value | aim |",
            "| --- | ---: | ---: |",
            f"| models | {len({row.name for row in rows})} | 25 |",
            f"| trainings | {len(rows)} | |",
            f"| median relative error | {statistics.median(errors):.2%} | 2 % |",
            f"| mean relative error | {statistics.mean(errors):.2%} | |",
            f"| largest relative error | {errors[-1]:.2%} | |",
            f"| failures with the estimate + {MARGIN:.0%} as limit | "
            f"{sum(row.fails for row in rows) / len(rows):.1%} | 2 % |",
            f"| time of an estimate / time of ten steps, median | {statistics.median(slow):.2f} | 1 |",
        ]
    )


def table(rows: list[Row]) -> str:
    """Return one line for each training."""
    mib = 1024**2
    lines = [
        "| model | optimizer | batch | measured MiB | estimated MiB | error | estimate s | ten steps s |",
        "| --- | --- | ---: | ---: | ---: | ---: | ---: | ---: |",
    ]
    lines += [
        f"| {row.name} | {row.optimizer} | {row.batch:,} | {row.measured / mib:.2f} | "
        f"{row.estimated / mib:.2f} | {row.error:+.2%} | {row.estimate_time:.2f} | {row.steps_time:.2f} |"
        for row in rows
    ]
    return "\n".join(lines)


if __name__ == "__main__":
    main()

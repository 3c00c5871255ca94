"""Measure the cost of memlog: ``python -m benchmarks [--rounds N] [--steps N] [--write FILE]``."""

from __future__ import annotations

import argparse
import datetime as dt
import os
import platform
import statistics
from pathlib import Path

from rich.console import Console
from rich.progress import track

from benchmarks import instructions, leak_search, startup, step
from benchmarks.loops import LOOPS, Worker
from benchmarks.publish import measure
from benchmarks.statistics import estimate

TARGET_MS = 1.0


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=21, help="blocks of each loop (default 21)")
    parser.add_argument("--steps", type=int, default=200, help="steps per block (default 200)")
    parser.add_argument("--write", type=Path, metavar="FILE", help="also write the tables to FILE")
    options = parser.parse_args()
    tables = "\n\n".join(
        [
            machine(),
            loops_table(options.rounds, options.steps),
            step_table(options.rounds),
            publish_table(),
            instructions_table(),
            startup_table(options.rounds),
            search_table(options.rounds),
        ]
    )
    Console().print(tables, markup=False, highlight=False)
    if options.write:
        options.write.write_text(_PREFACE + tables + "\n")


_PREFACE = """# Benchmarks

Written by `make bench`. Blocks of the loops are interleaved. Each block is compared with the bare block of
the same round, so a change of the machine's speed affects both. Figures are medians with the
distribution-free interval that contains the true median with at least 95 % confidence.

"""


def machine() -> str:
    """Return a sentence with the machine and the versions of packages."""
    from importlib.metadata import distributions

    versions = {one.metadata["Name"]: one.version for one in distributions()}
    packages = ", ".join(
        f"{name} {versions[name]}"
        for name in ("torch", "mlflow", "wandb", "msgspec")
        if name in versions
    )
    return (
        f"{dt.datetime.now(dt.timezone.utc):%Y-%m-%d}: {_processor()}, {os.cpu_count()} "
        f"cores, {platform.system()} {platform.release()}, Python {platform.python_version()}, "
        f"{packages}."
    )


def _processor() -> str:
    lines = Path("/proc/cpuinfo").read_text().splitlines() if Path("/proc/cpuinfo").exists() else []
    names = [line.split(":", 1)[1].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.processor() or platform.machine()


def loops_table(rounds: int, steps: int) -> str:
    """Run every loop in interleaved blocks, compare each with the bare loop, and return the table."""
    batch = calibrated_batch()
    workers = [Worker(name, batch) for name in LOOPS]
    medians: dict[str, list[float]] = {name: [] for name in LOOPS}
    try:
        for worker in workers:
            worker.block(steps)  # not measured: imports, first steps, the tracker's first run
        for number in track(range(rounds), description="loops"):
            shift = number % len(workers)
            for worker in workers[shift:] + workers[:shift]:
                medians[worker.name].append(statistics.median(worker.block(steps)) * 1e3)
    finally:
        for worker in workers:
            worker.close()
    lines = [
        f"A training step of about {TARGET_MS:g} ms, {rounds} blocks of {steps} steps each:\n",
        "| loop | step, ms | step / bare step |",
        "|---|---|---|",
    ]
    for name, values in medians.items():
        ratios = [value / bare for value, bare in zip(values, medians["bare"], strict=True)]
        lines.append(f"| {name} | {estimate(values).format(3)} | {estimate(ratios).format(3)} |")
    return "\n".join(lines)


def calibrated_batch() -> int:
    """Return the batch size with which a bare step takes about `TARGET_MS` on this machine."""
    batch = 16
    while batch < 4096:
        worker = Worker("bare", batch)
        worker.block(50)
        taken = statistics.median(worker.block(100)) * 1e3
        worker.close()
        if taken >= TARGET_MS * 0.95:
            break
        batch = min(max(batch + 8, int(batch * TARGET_MS / taken)), batch * 2)
    return batch


def step_table(rounds: int) -> str:
    """Measure what a step adds beside a lower bound and psutil's call, and return the table."""
    processes = max(rounds // 3, 1)
    lines = [
        f"Processor time of the training thread, in {processes} processes. *lean* reads the resident set and "
        "its largest size, encodes one event and stores it into a mapped file, and nothing else:\n",
        "| added to a step | µs |",
        "|---|---|",
    ]
    found = step.measure(processes, 40, calibrated_batch())
    lines += [f"| {name} | {value.format(1)} |" for name, value in found.items()]
    return "\n".join(lines)


def publish_table() -> str:
    """Measure the time of one publish, and return the table."""
    lines = ["One batch event, with nothing else in the loop:\n", "| | µs |", "|---|---|"]
    lines += [f"| {name} | {value.format(2)} |" for name, value in measure().items()]
    return "\n".join(lines)


def instructions_table() -> str:
    """Count instructions, store the counts for the test that compares them, and return the table.

    Raises:
        SystemExit: This machine lacks a program for that.
    """
    counts = instructions.counted()
    instructions.store(counts)
    return instructions.section(counts)


def startup_table(rounds: int) -> str:
    """Measure the time of import, init and finish, and return the table."""
    lines = [
        f"Once per run, in {rounds} fresh processes, each of which imports all that it needs:\n",
        "| | ms | of which processor time, ms |",
        "|---|---|---|",
    ]
    for name, (clock, processor) in startup.measure(rounds).items():
        lines.append(f"| `{name}` | {clock.format(1)} | {processor.format(1)} |")
    return "\n".join(lines)


def search_table(rounds: int) -> str:
    """Measure what the search for the cause of growth costs, and return the table."""
    pairs = max(rounds // 3, 1)
    lines = [
        f"Search for the cause of growth: {leak_search.STEPS} steps of about 5 ms, {pairs} pairs of "
        "processes, with memlog and without. Processor time of the training process, `init` and `finish` "
        "included:\n",
        "| loop | without memlog, s | added, s | longest step, ms | with memlog, ms |",
        "|---|---|---|---|---|",
    ]
    for name, cost in leak_search.measure(pairs).items():
        figures = (
            cost.bare.format(2),
            cost.added.format(2),
            cost.longest_bare.format(1),
            cost.longest.format(1),
        )
        lines.append(f"| {name} | {' | '.join(figures)} |")
    return "\n".join(lines)


if __name__ == "__main__":
    main()

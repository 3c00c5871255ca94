"""Measure the share of the time that tracing takes in runs of 10 to 60 seconds, with the default budget.

Each model trains for a minute in a process of its own. What it has traced after 10 seconds is what a run of
10 seconds traces.
`python -m benchmarks.short_runs` prints a table in Markdown.
"""

from __future__ import annotations

import os
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import msgspec
import torch

import memlog
from benchmarks.layer_models import GPT, MODELS, Training
from memlog.events import Trace
from memlog.journal import RunDirectory

LENGTHS = (10, 20, 40, 60)
"""Lengths of runs in seconds."""
DEEP = "deep"
"""A model of 274 modules with short steps, whose trace takes as long as ten steps or more."""
NAMES = ("mlp", "unet", "gpt", DEEP)


class Traced(msgspec.Struct, frozen=True):
    """A traced step.

    Attributes:
        step: Number of the step.
        second: Seconds from the start of training to the end of the step.
        cost: Seconds of processor time beyond the median step.
        is_whole: True if the trace covers the whole step.
    """

    step: int
    second: float
    cost: float
    is_whole: bool


def row(name: str) -> str:
    """Train a model in a new process, and return its row of the table."""
    root = str(Path(__file__).resolve().parents[1])
    clean = {key: value for key, value in os.environ.items() if not key.startswith("MEMLOG_")}
    with tempfile.TemporaryDirectory(prefix="memlog-benchmark-") as directory:
        done = subprocess.run(
            [sys.executable, "-m", "benchmarks.short_runs", name],
            cwd=directory,
            env={**clean, "PYTHONPATH": root},
            stdout=subprocess.PIPE,
            check=True,
        )
    description, step, traces = msgspec.json.decode(
        done.stdout, type=tuple[str, float, list[Traced]]
    )
    cells = []
    for length in LENGTHS:
        there = [trace for trace in traces if trace.second <= length]
        parts = sum(not trace.is_whole for trace in there)
        what = f"{len(there)} traced" + (f", {parts} in part" if parts else "")
        cells.append(f"{sum(trace.cost for trace in there) / length:.1%} ({what})")
    first = f"step {traces[0].step} at {traces[0].second:.0f} s" if traces else "none"
    return f"| {description} | {step * 1e3:.0f} | {first} | {' | '.join(cells)} |"


def train(name: str) -> tuple[str, float, list[Traced]]:
    """Train a model for a minute. Return its description, the seconds of a step, and the traced steps."""
    torch.set_num_threads(1)
    if name == DEEP:
        MODELS[DEEP] = (
            "A deep GPT (30 layers of 64, 2 x 16)",
            lambda: GPT(256, 64, layers=30, heads=2),
            lambda: torch.randint(256, (2, 16)),
        )
    training = Training(name, "cpu")
    for _ in range(3):
        training.step()  # not measured: torch's own caches
    session = memlog.init("local", model=training.model, layers=True)
    begun = time.perf_counter()
    seconds: list[float] = []
    work: list[float] = []
    while not seconds or seconds[-1] < LENGTHS[-1]:
        worked = time.process_time()
        training.step()
        work.append(time.process_time() - worked)
        seconds.append(time.perf_counter() - begun)
    memlog.finish()
    assert session.directory is not None
    entries = (entry for file in RunDirectory(session.directory).files() for entry in file.read())
    events = [entry.event for entry in entries if isinstance(entry.event, Trace)]
    usual = statistics.median(work)
    return (
        training.description,
        usual,
        [
            Traced(event.step, seconds[event.step], work[event.step] - usual, event.exact)
            for event in events
            if event.step is not None
        ],
    )


if __name__ == "__main__":
    if len(sys.argv) > 1:
        sys.stdout.write(msgspec.json.encode(train(sys.argv[1])).decode())
    else:
        print(
            "| model | ms per step | first trace | " + " | ".join(f"{x} s" for x in LENGTHS) + " |"
        )
        print("| --- " * (3 + len(LENGTHS)) + "|")
        for each in NAMES:
            print(row(each), flush=True)

"""Measure what the search for the cause of growth costs: processor time of a run, and its longest step.

Each loop has steps of about 5 ms. It runs in fresh processes, with and without memlog in turn. The figures
are processor time of the training process, so they hardly depend on the machine's other work.
"""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
from pathlib import Path

import msgspec
from rich.progress import track

from benchmarks.statistics import Estimate, estimate

STEPS = 600
LOOPS = {
    "healthy": "pass",
    "a tensor of 1 MiB kept at each step": "kept.append(torch.ones(2**18))",
    "8 MiB kept every 30 steps": "kept.append(torch.ones(2**21)) if step % 30 == 0 else None",
    "the graph kept at each step": "kept.append(loss)",
    "strings kept at each step": "kept.extend(f'{step}-{i}' * 20 for i in range(3000))",
}
PROGRAM = """
import json, sys, time
import torch
torch.set_num_threads(1)
torch.manual_seed(0)
model = torch.nn.Sequential(*(torch.nn.Linear(256, 256) for _ in range(8)))
optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
inputs = torch.randn(200, 256)
kept, longest = [], 0

def train(step):
    loss = model(inputs).square().mean()
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    {body}

for step in range(-20, 0):
    model(inputs).square().mean().backward()
    optimizer.zero_grad()
if {with_memlog}:
    import memlog
    memlog.init("local", config={{"memlog": {{"quiet": True}}}})
begun = time.process_time_ns()
for step in range({steps}):
    before = time.thread_time_ns()
    train(step)
    longest = max(longest, time.thread_time_ns() - before)
if {with_memlog}:
    memlog.finish()
taken = time.process_time_ns() - begun
print(json.dumps([taken / 1e9, longest / 1e6]))
"""


class Cost(msgspec.Struct):
    """Processor time of a loop's processes, in seconds, and that of its longest step, in milliseconds."""

    bare: Estimate
    added: Estimate
    longest_bare: Estimate
    longest: Estimate


def measure(rounds: int) -> dict[str, Cost]:
    """Run each loop ``rounds`` times with memlog and without."""
    found = {}
    for name, body in track(LOOPS.items(), description="searches for causes"):
        pairs = [(_run(body, False), _run(body, True)) for _ in range(rounds)]
        found[name] = Cost(
            estimate([bare[0] for bare, _ in pairs]),
            estimate([with_memlog[0] - bare[0] for bare, with_memlog in pairs]),
            estimate([bare[1] for bare, _ in pairs]),
            estimate([with_memlog[1] for _, with_memlog in pairs]),
        )
    return found


def _run(body: str, with_memlog: bool) -> tuple[float, float]:
    program = PROGRAM.format(body=body, with_memlog=with_memlog, steps=STEPS)
    clean = {key: value for key, value in os.environ.items() if not key.startswith("MEMLOG_")}
    root = str(Path(__file__).resolve().parents[1])
    with tempfile.TemporaryDirectory(prefix="memlog-benchmark-") as directory:
        file = Path(directory, "train.py")  # a file, because the search reads the program's source
        file.write_text(program)
        done = subprocess.run(
            [sys.executable, str(file)],
            cwd=directory,
            env={**clean, "PYTHONPATH": root},
            capture_output=True,
            check=True,
        )
    seconds, longest = msgspec.json.decode(done.stdout.splitlines()[-1], type=tuple[float, float])
    return seconds, longest

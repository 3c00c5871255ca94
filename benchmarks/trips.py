"""Count the files and functions of memlog that one trip through it enters.

A reader who follows a trip opens these files. ``python -m benchmarks.trips`` prints a table with the aims of
the project. Counted are functions that are called; code that runs while a module is imported is not.
"""

from __future__ import annotations

import subprocess
import sys
import tempfile
from pathlib import Path

import msgspec
from rich.console import Console
from rich.table import Table

import memlog

TRAINING = """
import torch
torch.manual_seed(0)
model = torch.nn.Sequential(torch.nn.Linear(64, 64), torch.nn.ReLU(), torch.nn.Linear(64, 64))
optimizer = torch.optim.Adam(model.parameters())
kept = []

def step(keep=0):
    model(torch.randn(32, 64)).square().mean().backward()
    optimizer.step()
    optimizer.zero_grad()
    if keep:
        kept.append(torch.ones(keep))
"""
RUN = TRAINING + "memlog.init('local')\nfor _ in range(120): step()\nmemlog.finish()\n"
COMMAND = "from memlog.cli.main import cli\nlook()\ncli({}, standalone_mode=False)\n"
TRIPS = {
    "a steady step": (
        TRAINING + "memlog.init('local')\nfor _ in range(300): step()\nlook()\nstep()\n",
        14,
    ),
    "four traced steps": (
        TRAINING
        + "memlog.init('local', layers=True, budget=1.0)\nlook()\nfor _ in range(70): step()\n",
        55,
    ),
    "400 steps with a leak": (
        TRAINING
        + "memlog.init('local')\nlook()\nfor _ in range(400): step(2**18)\nmemlog.finish()\n",
        75,
    ),
    "estimate": (
        TRAINING + "look()\nmemlog.estimate(step, model=model, optimizer=optimizer)\n",
        40,
    ),
    "sync": (RUN + COMMAND.format("['sync', 'latest', '--to', 'tensorboard']"), 28),
    "show": (RUN + COMMAND.format("['show', 'latest']"), 16),
    "compare": (RUN + RUN + COMMAND.format("['compare', 'latest', 'latest']"), 10),
    "report": (RUN + COMMAND.format("['report', 'latest', '-o', 'report.html']"), 24),
}
"""Program of each trip, which is counted from `look` on, and the aim for the number of files."""
COUNTING = f"""
import inspect, json, os, sys, threading
import memlog
entered = set()
folder = {str(Path(memlog.__file__).parent)!r} + os.sep

def of_import(code):
    return not code.co_flags & inspect.CO_OPTIMIZED  # a module's or a class's own code

def seen(frame, event, argument):
    code = frame.f_code
    if event == "call" and code.co_filename.startswith(folder) and not of_import(code):
        if frame.f_back is None or not of_import(frame.f_back.f_code):
            entered.add((code.co_filename, code.co_qualname))

def look():
    threading.setprofile(seen)
    sys.setprofile(seen)
"""
TELLING = """
sys.setprofile(None)
threading.setprofile(None)
json.dump([len({file for file, _ in entered}), len(entered)], open("entered.json", "w"))
"""


def main() -> None:
    table = Table("trip", "files", "aim", "functions")
    for name, (program, aim) in TRIPS.items():
        with tempfile.TemporaryDirectory() as folder:
            done = subprocess.run(
                [sys.executable, "-c", COUNTING + program + TELLING],
                cwd=folder,
                capture_output=True,
                text=True,
                check=False,
            )
            if done.returncode:
                sys.exit(f"{name}: {done.stderr}")
            files, functions = msgspec.json.decode(Path(folder, "entered.json").read_bytes())
        table.add_row(name, str(files), str(aim), str(functions))
    Console().print(table)


if __name__ == "__main__":
    main()

"""Measure the work of each run: importing memlog, ``init`` and ``finish``, in fresh processes."""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
from collections import defaultdict

from benchmarks.statistics import Estimate, estimate

_PROGRAM = """
import json, os, sys, time

def now():
    return time.perf_counter(), time.process_time()

def ms(since):
    return [(late - early) * 1e3 for early, late in zip(since, now())]

begun = now()
import memlog
figures = {"import memlog": ms(begun)}
os.environ["MLFLOW_TRACKING_URI"] = "http://127.0.0.1:9"  # no server listens there
for name, backend in (('memlog.init("local")', "local"), ('memlog.init("mlflow"), server down', "mlflow")):
    begun = now()
    session = memlog.init(backend, dir="runs", config={"memlog": {"linger": 5}})
    figures[name] = ms(begun)
    for _ in range(10):
        session.step()
    begun = now()
    session.finish()
    figures[name.replace("init", "finish", 1)] = ms(begun)
print(json.dumps(figures))
"""


def measure(rounds: int) -> dict[str, tuple[Estimate, Estimate]]:
    """Run a program that measures itself.

    Args:
        rounds: Number of processes, one after the other. One more runs first and is not measured.

    Returns:
        Wall-clock milliseconds and milliseconds of processor time, by action.
    """
    clock: dict[str, list[float]] = defaultdict(list)
    processor: dict[str, list[float]] = defaultdict(list)
    for counted in (False, *[True] * rounds):
        with tempfile.TemporaryDirectory() as folder:
            done = subprocess.run(
                [sys.executable, "-c", _PROGRAM], cwd=folder, capture_output=True, check=True
            )
        if counted:
            for name, (wall, cpu) in json.loads(done.stdout).items():
                clock[name].append(wall)
                processor[name].append(cpu)
    return {name: (estimate(clock[name]), estimate(processor[name])) for name in clock}

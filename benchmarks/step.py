"""Measure what memlog adds to a step, beside psutil's call and a hook that only reads and publishes.

This hook (*lean*) is a lower bound: it reads the resident set and its largest size, encodes one event and
stores it into a mapped file. Blocks of bare steps, and of steps with each of the three, alternate in one
process, so a change of the machine's speed affects all of them. The figures are the thread's processor time,
which other programs affect less than the time on the clock.
"""

from __future__ import annotations

import json
import mmap
import os
import subprocess
import sys
import tempfile
import time
from collections import defaultdict
from collections.abc import Callable
from pathlib import Path
from resource import RUSAGE_SELF, getrusage
from typing import Any

import msgspec

from benchmarks.loops import Step
from benchmarks.statistics import Estimate, estimate

BLOCK = 20
"""Number of steps in a block."""
FIRST = 200
"""Number of steps after `init` that are reported on their own."""
SETTLED = 1_500
"""Number of steps with memlog before its steady steps are measured."""
AFTER_INIT, STEADY = f"memlog, first {FIRST} steps", "memlog, later steps"
LEAN, PSUTIL = "lean", "psutil's `memory_info().rss`"


def measure(processes: int, blocks: int, batch: int) -> dict[str, Estimate]:
    """Measure in fresh processes.

    Args:
        processes: Number of processes, one after the other.
        blocks: Number of blocks of each kind in a process, after the first steps.
        batch: Batch size of the step (`benchmarks.loops.Step`).

    Returns:
        Microseconds of processor time that are added to a bare step, by what adds them.
    """
    found: dict[str, list[float]] = defaultdict(list)
    root = str(Path(__file__).resolve().parents[1])
    clean = {key: value for key, value in os.environ.items() if not key.startswith("MEMLOG_")}
    for _ in range(processes):
        with tempfile.TemporaryDirectory(prefix="memlog-benchmark-") as directory:
            done = subprocess.run(
                [sys.executable, "-m", "benchmarks.step", str(blocks), str(batch)],
                cwd=directory,
                env={**clean, "PYTHONPATH": root},
                stdout=subprocess.PIPE,
                check=True,
            )
        for name, values in json.loads(done.stdout).items():
            found[name] += values
    return {name: estimate(values) for name, values in found.items()}


class _Reading(msgspec.Struct, frozen=True, array_like=True):
    time_us: int
    step: int
    rss: int
    peak: int


class Lean:
    """Hook that reads and publishes, and does nothing else."""

    def __init__(self) -> None:
        self._size = 1 << 22
        descriptor = os.open("lean", os.O_RDWR | os.O_CREAT, 0o600)
        os.posix_fallocate(descriptor, 0, self._size)
        self._map = mmap.mmap(descriptor, self._size)
        self._at = self._step = 0
        self._statm = os.open("/proc/self/statm", os.O_RDONLY)
        self._page = os.sysconf("SC_PAGE_SIZE")
        self._encode = msgspec.json.Encoder().encode

    def __call__(self, *_: object) -> None:
        rss = int(os.pread(self._statm, 64, 0).split(b" ", 2)[1]) * self._page
        peak = getrusage(RUSAGE_SELF).ru_maxrss * 1024
        event = _Reading(time.time_ns() // 1000, self._step, rss, peak)
        line = self._encode(event) + b"\n"
        end = self._at + len(line)
        if end > self._size:  # a real journal begins another file
            self._at, end = 0, len(line)
        self._map[self._at : end] = line
        self._at = end
        self._step += 1


class _Memlog:
    """Session whose hooks are removed from torch while other blocks run. It uses private attributes.

    What memlog does from time to time (look at inputs, at devices, at its helper process) is due by the
    clock. The time of the other blocks is added to each due time. Otherwise memlog would do the work of all
    blocks in its own.
    """

    def __init__(self) -> None:
        import memlog

        session = memlog.init("local", config={"memlog": {"quiet": True}})
        assert session._live is not None
        self._recording = session._live
        self._recording._autolog.remove()
        self._ended = time.perf_counter_ns()

    def block(self, train: Callable[[], None]) -> float:
        from memlog.autolog.optimizer_steps import listen

        batches = self._recording.batches
        others = time.perf_counter_ns() - self._ended
        batches.health.due += others
        batches.helper_check_due += others
        batches._read_devices_at += others
        self._recording._inputs.next_look += others
        self._recording._inputs._begun += others
        self._recording._autolog = listen(batches.optimizer_stepped)
        taken = _block(train)
        self._recording._autolog.remove()
        self._ended = time.perf_counter_ns()
        return taken


def _block(train: Callable[[], None]) -> float:
    """Return the mean microseconds of processor time of a block's steps."""
    begun = time.thread_time_ns()
    for _ in range(BLOCK):
        train()
    return (time.thread_time_ns() - begun) / BLOCK / 1e3


def _hooked(train: Callable[[], None], hook: Callable[..., object]) -> float:
    from torch.optim.optimizer import register_optimizer_step_post_hook

    handle = register_optimizer_step_post_hook(hook)  # type: ignore[arg-type]  # it takes any result
    taken = _block(train)
    handle.remove()
    return taken


def run(blocks: int, batch: int) -> dict[str, list[float]]:
    """Run the blocks, and return the differences to the bare block of the same round, in microseconds."""
    import psutil

    train: Any = Step(batch)
    process, lean = psutil.Process(), Lean()
    for _ in range(300):
        train()
    session = _Memlog()
    found: dict[str, list[float]] = defaultdict(list)
    for _ in range(FIRST // BLOCK):
        bare = _block(train)
        found[AFTER_INIT].append(session.block(train) - bare)
    for _ in range((SETTLED - FIRST) // BLOCK):
        session.block(train)
    for _ in range(blocks):
        bare = _block(train)
        found["bare step"].append(bare)
        found[LEAN].append(_hooked(train, lean) - bare)
        found[PSUTIL].append(_hooked(train, lambda *_: process.memory_info().rss) - bare)
        found[STEADY].append(session.block(train) - bare)
        found["memlog, later steps, more than lean"].append(found[STEADY][-1] - found[LEAN][-1])
    return found


if __name__ == "__main__":
    results = run(int(sys.argv[1]), int(sys.argv[2]))
    sys.stdout.write(json.dumps(results))
    sys.stdout.flush()
    os._exit(
        0
    )  # the helper process ends by itself, and its last lines are no part of the measurement

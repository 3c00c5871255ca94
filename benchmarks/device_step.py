"""Measure how much longer it takes to publish a step if a CUDA device is in use.

``python -m benchmarks.device_step [--rounds N]``, with torch's CUDA build. A simulated device
(tests/cuda_runtime) is enough: torch's statistics and memlog's work are the host's.

Two processes publish steps in turn, one with tensors on a device and one without. The time is that of the
processor, so other processes count little.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable

from benchmarks.statistics import Estimate, estimate

CALLS = 1_000
ROUNDS = 21


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=ROUNDS)
    for name, found in measure(parser.parse_args().rounds).items():
        print(f"{name}: {found.median:.1f} µs ({found.low:.1f} to {found.high:.1f})")


def measure(rounds: int = ROUNDS) -> dict[str, Estimate]:
    """Return microseconds per call, without and with a device, the differences, and parts of them."""
    workers = [_start(device) for device in ("cpu", "cuda")]
    rows = []
    try:
        for _ in range(rounds):
            (host, *_), (device, probe, stats) = map(_block, workers)
            rows.append((host, device, device - host, probe, stats))
    finally:
        for worker in workers:
            worker.communicate()
    names = (
        "publish, no device in use",
        "publish, one device in use",
        "difference",
        "the probe of devices alone",
        "torch's statistics alone",
    )
    columns = zip(*rows, strict=True)
    return {name: estimate(list(row)) for name, row in zip(names, columns, strict=True)}


def _start(device: str) -> subprocess.Popen[str]:
    command = [sys.executable, "-m", "benchmarks.device_step", "--worker", device]
    return subprocess.Popen(command, text=True, stdin=subprocess.PIPE, stdout=subprocess.PIPE)


def _block(worker: subprocess.Popen[str]) -> list[float]:
    assert worker.stdin is not None
    assert worker.stdout is not None
    print("go", file=worker.stdin, flush=True)
    return [float(text) for text in worker.stdout.readline().split()]


def _work(device: str) -> None:
    import torch

    import memlog
    from memlog._internal.diagnostics import Diagnostics
    from memlog.probes.accelerator import AcceleratorProbe

    with tempfile.TemporaryDirectory(prefix="memlog-benchmark-") as folder:
        os.environ["MEMLOG_DIR"] = folder
        kept = torch.ones(2**20, device=device)
        session, probe = memlog.init("local"), AcceleratorProbe(Diagnostics())
        calls: list[Callable[[], object]] = [session.step, probe.read]
        if device == "cuda":
            statistics = torch._C._cuda_memoryStats  # noqa: SLF001 - what the probe calls
            calls += [lambda: statistics(0)]
        for _ in range(3):
            for call in calls:
                _microseconds(call)
        for _ in sys.stdin:
            print(*(_microseconds(call) for call in calls), flush=True)
        memlog.finish()
        del kept


def _microseconds(call: Callable[[], object]) -> float:
    begun = time.thread_time()
    for _ in range(CALLS):
        call()
    return (time.thread_time() - begun) / CALLS * 1e6


if __name__ == "__main__":
    if sys.argv[1:2] == ["--worker"]:
        _work(sys.argv[2])
    else:
        main()

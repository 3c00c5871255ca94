"""Measure the time of one publish in microseconds, with and without its probes."""

from __future__ import annotations

import os
import tempfile
import time
from collections.abc import Callable

from benchmarks.statistics import Estimate, estimate

CALLS = 2_000
REPEATS = 41


def measure() -> dict[str, Estimate]:
    """Measure publishing a batch event in this process, in interleaved repeats.

    Returns:
        Microseconds per call: in total, of the probes alone, the difference, and with monitoring disabled.
    """
    import memlog
    from memlog._internal.diagnostics import Diagnostics
    from memlog.probes.accelerator import AcceleratorProbe
    from memlog.probes.process import HostProbe

    with tempfile.TemporaryDirectory(prefix="memlog-benchmark-") as directory:
        os.environ["MEMLOG_DIR"] = directory
        disabled = memlog.init("local", enabled=False)
        host, accelerators = HostProbe(Diagnostics()), AcceleratorProbe(Diagnostics())
        enabled = memlog.init("local")

        def probes() -> None:
            accelerators.read()
            host.read()

        rows = [
            [_microseconds(call) for call in (enabled.step, probes, disabled.step, _nothing)]
            for _ in range(REPEATS)
        ]
        memlog.finish()
    return {
        "publish, probes included": estimate([row[0] - row[3] for row in rows]),
        "its probes alone": estimate([row[1] - row[3] for row in rows]),
        "publish beyond its probes": estimate([row[0] - row[1] for row in rows]),
        "disabled": estimate([row[2] - row[3] for row in rows]),
    }


def _nothing() -> None:
    """Do nothing. The cost of this call is subtracted from the other measurements."""


def _microseconds(call: Callable[[], object]) -> float:
    begun = time.perf_counter()
    for _ in range(CALLS):
        call()
    return (time.perf_counter() - begun) / CALLS * 1e6

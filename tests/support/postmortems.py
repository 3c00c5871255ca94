"""Runs that ended badly, and their reports."""

from __future__ import annotations

from pathlib import Path

import msgspec

from memlog._internal.diagnostics import Diagnostics
from memlog.events import Event, OutOfMemory, Sample, Trace, TracedLayer
from memlog.reports.final_state import FinalState, final_state
from memlog.reports.oom_diagnosis import Witness
from memlog.reports.postmortem import Report, report
from support.journals import GIB, MIB, MadeRun, at, batch

FAILURE = OutOfMemory(
    at(40),
    29,
    "host",
    400 * MIB,
    100 * MIB,
    GIB,
    "the limit on the process's address space (ulimit -v)",
    GIB - 100 * MIB,
    None,
    "blocks.0 (Block)",
    "forward",
    "DefaultCPUAllocator: can't allocate memory: you tried to allocate 419430400 bytes.",
    free_after=500 * MIB,
)
SAMPLE = Sample(at(30), 28, GIB, 1, 20 * GIB, None, None)
KILLED = Witness("helper", oom_kills=0)
ADVICE = ("half the batch", "checkpoint", "autocast")


def trace(
    step: int | None = 0, peak: int = 400 * MIB, at_peak: dict[str, int] | None = None
) -> Trace:
    held = at_peak or {"activations": peak}
    layers = (TracedLayer("blocks.0", peak // 2, peak, peak, peak), TracedLayer("", 1, 1, 1, 1))
    return Trace(at(1), step, "dispatch", True, peak, held, layers, 0)


def ended(root: Path, *events: Event, steps: int = 30) -> FinalState:
    run = MadeRun(root).write(*(batch(step, GIB) for step in range(steps)), *events)
    return final_state(run.closed())


def changed(**fields: object) -> OutOfMemory:
    return msgspec.structs.replace(FAILURE, **fields)


def report_of(state: FinalState, witness: Witness = KILLED) -> Report:
    health = Diagnostics()
    found = report(state, witness, None, health)
    assert not health.faults
    return found

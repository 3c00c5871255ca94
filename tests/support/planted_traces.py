"""Made-up traced steps: the events in a journal, and the file with the worst step that the tracer keeps."""

from __future__ import annotations

import random
from collections.abc import Sequence
from typing import NamedTuple

import msgspec
from msgspec.structs import replace

from memlog.events import Trace
from memlog.journal import RunDirectory
from memlog.trace import encoding
from memlog.trace.accounting import Accountant
from memlog.trace.records import Exactness, RecordedTrace
from memlog.trace.result import TraceFacts, build
from memlog.tracer.schedule.kept_trace import trace_event
from support.journals import MIB, at

_PATHS = (encoding.OUTSIDE_PATH, "body.0", "body.1", "head")
_KINDS = ("", "Linear", "ReLU", "Linear")
_STEP_NS = 100_000_000


class TracedStep(NamedTuple):
    event: Trace
    trace: RecordedTrace


def traced_step(step: int, peak: int, *, exact: bool, device: str = "cpu") -> TracedStep:
    """Return a traced step with a peak of some bytes, in a model of three layers."""
    parameters, state = peak // 8, peak // 4
    sizes = (peak - parameters - state) // 2
    pieces: list[tuple[int, int, int, int]] = [
        (parameters, 1, encoding.BEFORE, encoding.PARAMETER),
        (state, 1, encoding.BEFORE, encoding.OPTIMIZER_STATE),
        (sizes, 1, encoding.FORWARD, encoding.ACTIVATION),
        (peak - parameters - state - sizes, 3, encoding.FORWARD, encoding.ACTIVATION),
    ]
    events = bytearray()
    for serial, (size, layer, phase, category) in enumerate(pieces, 1):
        time_ns = serial * 1_000_000 if phase else 0
        events += encoding.pack(serial, size, time_ns, layer, encoding.ALLOC, phase, category, 0)
    for serial in (3, 4):
        place = (encoding.FREE, encoding.BACKWARD, 0, 0)
        events += encoding.pack(serial, 0, (10 + serial) * 1_000_000, 0, *place)
    accountant = Accountant()
    accountant.fold(bytes(events))
    accountant.finish()
    exactness: Exactness = "exact" if exact else "lower bound"
    facts = TraceFacts(
        engine="dispatch" if device == "cpu" else "native",
        why="made up",
        device=device,
        exactness=exactness,
        started_us=at(step / 10),
        duration_ns=_STEP_NS,
        events=len(pieces) + 2,
        kept_events=len(pieces) + 2,
        dropped={},
        unseen=() if exact else ("A part of the step is missing.",),
        fragmentation=None,
        fragmentation_reason="made up",
    )
    result = build(accountant, _PATHS, facts)
    trace = RecordedTrace(result, _PATHS, bytes(events), kinds=_KINDS, optimizers=("Adam",))
    # Its time is that of the step, so that a seed gives the same journal each time.
    return TracedStep(replace(trace_event(result, step), time_us=at((step + 0.5) / 10)), trace)


def traced_steps(
    rng: random.Random, steps: Sequence[int], device: str = "cpu", *, told: bool = True
) -> list[TracedStep]:
    """Return traces of some steps. At least one is exact, and the largest may be inexact.

    With ``told``, the events tell which trace is kept. Of traces that are equally exact, that is the largest.
    """
    sure = rng.randrange(len(steps))
    # Peaks that differ by less than 1 % count as equal.
    peaks = [size * MIB for size in rng.sample(range(80, 400, 20), len(steps))]
    found: list[TracedStep] = []
    worst: TracedStep | None = None
    for number, step in enumerate(steps):
        exact = number == sure or rng.random() < 0.5
        made = traced_step(step, peaks[number], exact=exact, device=device)
        kept = worst is None or _rank(made) > _rank(worst)
        if kept:
            worst = made
        found.append(made._replace(event=replace(made.event, kept=kept)) if told else made)
        worst = found[-1] if kept else worst
    return found


def _rank(made: TracedStep) -> tuple[bool, int]:
    return made.event.exact, made.event.peak or 0


def worst_of(traced: Sequence[TracedStep]) -> TracedStep:
    """Return the trace that the run's folder keeps."""
    return max(traced, key=_rank)


def keep(run: RunDirectory, made: TracedStep) -> None:
    """Write the file with the worst traced step, as the tracer does."""
    run.worst_step.write_bytes(msgspec.msgpack.encode((made.event, made.trace)))

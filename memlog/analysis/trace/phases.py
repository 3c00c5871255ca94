"""What was live as the phases of a traced training step ended."""

from __future__ import annotations

import msgspec

from memlog.analysis.trace import stream
from memlog.analysis.trace.records import Trace


class PhaseLevels(msgspec.Struct, frozen=True):
    """Bytes that were live; ``None`` where the step did not come so far."""

    before: int
    """As the trace began."""
    data: int | None
    """As the first module was called: with the batch."""
    forward: int | None
    """As the first backward pass began: with what it needs."""
    backward: int | None
    """As the last backward pass had ended."""
    optimizer: int | None
    """As the optimizer's last step had ended."""
    end: int
    """As the trace ended."""


def phase_levels(trace: Trace) -> PhaseLevels | None:
    """Reads them off a trace of one step; ``None`` where it does not hold every event."""
    result = trace.result
    if result.truncated or result.before is None or result.end is None:
        return None
    live = result.before
    sizes: dict[int, int] = {}
    data = forward = backward = optimizer = None
    phase = stream.FORWARD
    for event in stream.decode(trace.events):
        if event.kind == stream.ALLOC:
            sizes[event.key] = event.size
            live += event.size if event.phase != stream.BEFORE else 0
        elif event.kind == stream.FREE:
            live -= sizes.pop(event.key, 0)
        elif event.kind == stream.ENTER and data is None:
            data = live
        elif event.kind == stream.TURN:
            if event.phase == stream.BACKWARD and forward is None:
                forward = live
            if phase == stream.BACKWARD:
                backward = live  # and again as each of its stretches ends
            elif phase == stream.OPTIMIZER:
                optimizer = live
            phase = event.phase
    return PhaseLevels(result.before, data, forward, backward, optimizer, result.end)

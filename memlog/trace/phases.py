"""Live bytes in each phase of a traced training step: the number at the end, and the highest number."""

from __future__ import annotations

from typing import Literal, TypeAlias, get_args

import msgspec

from memlog.trace import encoding
from memlog.trace.records import RecordedTrace

PhaseName: TypeAlias = Literal["data", "forward", "backward", "optimizer", "end"]
_EVERY_EVENT = ("exact", "lower bound", "approximate")


class PhaseLevel(msgspec.Struct):
    """Live bytes of one phase."""

    after: int
    """Live bytes at the end of the phase. If a step accumulates gradients, a phase can end several
    times. For ``forward``, the first end counts. For each other phase, the last end counts."""
    highest: int
    """Highest number of live bytes in the phase."""


def phase_levels(trace: RecordedTrace) -> dict[PhaseName, PhaseLevel] | None:
    """Return the live bytes of each phase that a traced step reached.

    The phase ``data`` is the time before the first call of a module. The phase ``end`` begins when a backward
    pass or an optimizer's step ends, and lasts until another phase begins. Return ``None`` if the trace does
    not hold every event, or if live bytes are unknown.
    """
    before = trace.result.before
    if trace.result.truncated or before is None or trace.result.exactness not in _EVERY_EVENT:
        return None
    tracker = _PhaseTracker(before)
    for event, allocation in encoding.decode_with_allocations(trace.events):
        tracker.apply(event, allocation)
    tracker.begin("end")
    tracker.begin("data")  # ends the phase "end"
    # "end" may begin before "optimizer", so the levels are put into the order of PhaseName.
    return {name: tracker.levels[name] for name in get_args(PhaseName) if name in tracker.levels}


class _PhaseTracker:
    def __init__(self, before: int) -> None:
        self.levels: dict[PhaseName, PhaseLevel] = {}
        self._live = self._highest = before
        self._current: PhaseName = "data"

    def apply(self, event: encoding.StreamEvent, allocation: encoding.StreamEvent | None) -> None:
        if event.kind == encoding.ALLOC:
            if event.phase != encoding.BEFORE:
                self._live += event.size
                self._highest = max(self._highest, self._live)
        elif event.kind == encoding.FREE and allocation is not None:
            self._live -= allocation.size
        elif event.kind == encoding.ENTER and event.phase == encoding.FORWARD:
            self.begin("forward")
        elif event.kind == encoding.PHASE_CHANGE:
            self._change_phase(event.phase)

    def _change_phase(self, phase: int) -> None:
        if phase == encoding.BACKWARD:
            self.begin("backward")
        elif phase == encoding.OPTIMIZER:
            self.begin("optimizer")
        elif self._current in ("backward", "optimizer"):
            self.begin("end")

    def begin(self, phase: PhaseName) -> None:
        if phase == self._current:
            return
        known = self.levels.get(self._current)
        if known is None:
            self.levels[self._current] = PhaseLevel(self._live, self._highest)
        else:
            known.highest = max(known.highest, self._highest)
            if self._current != "forward":
                known.after = self._live
        self._current, self._highest = phase, self._live

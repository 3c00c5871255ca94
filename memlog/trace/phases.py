"""A traced training step phase by phase: what was live as each ended, and at most."""

from __future__ import annotations

from typing import Literal, TypeAlias, get_args

import msgspec

from memlog.trace import encoding
from memlog.trace.records import Trace

PhaseName: TypeAlias = Literal["data", "forward", "backward", "optimizer", "end"]
_EVERY_EVENT = ("exact", "lower bound", "approximate")


class PhaseLevel(msgspec.Struct):
    """Bytes that were live."""

    after: int
    """As it ended for the last time; of several forward passes (accumulated gradients) the first."""
    highest: int
    """At most."""


def phase_levels(trace: Trace) -> dict[PhaseName, PhaseLevel] | None:
    """The phases that a traced step came to.

    ``data`` is what comes before the first module is called, ``end`` what belongs to no other phase and comes
    after the backward pass.

    Args:
        trace: Of one step.

    Returns:
        ``None`` where the trace does not hold every event, or does not know what was live.
    """
    before = trace.result.before
    if trace.result.truncated or before is None or trace.result.exactness not in _EVERY_EVENT:
        return None
    fold = _Fold(before)
    for event in encoding.decode(trace.events):
        fold.take(event)
    fold.turn("end")
    fold.turn("data")  # which ends the end
    # What comes between the backward pass and the optimizer is heard of first, and counts as the end.
    return {name: fold.levels[name] for name in get_args(PhaseName) if name in fold.levels}


class _Fold:
    def __init__(self, before: int) -> None:
        self.levels: dict[PhaseName, PhaseLevel] = {}
        self._live = self._highest = before
        self._sizes: dict[int, int] = {}
        self._now: PhaseName = "data"

    def take(self, event: encoding.StreamEvent) -> None:
        if event.kind == encoding.ALLOC:
            self._sizes[event.key] = event.size
            if event.phase != encoding.BEFORE:
                self._live += event.size
                self._highest = max(self._highest, self._live)
        elif event.kind == encoding.FREE:
            self._live -= self._sizes.pop(event.key, 0)
        elif event.kind == encoding.ENTER and event.phase == encoding.FORWARD:
            self.turn("forward")
        elif event.kind == encoding.PHASE_CHANGE:
            self._turned(event.phase)

    def _turned(self, phase: int) -> None:
        if phase == encoding.BACKWARD:
            self.turn("backward")
        elif phase == encoding.OPTIMIZER:
            self.turn("optimizer")
        elif self._now in ("backward", "optimizer"):
            self.turn("end")

    def turn(self, to: PhaseName) -> None:
        """A phase ends, and another begins."""
        if to == self._now:
            return
        known = self.levels.get(self._now)
        if known is None:
            self.levels[self._now] = PhaseLevel(self._live, self._highest)
        else:
            known.highest = max(known.highest, self._highest)
            if self._now != "forward":
                known.after = self._live
        self._now, self._highest = to, self._live

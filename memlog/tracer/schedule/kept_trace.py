"""What a session's traces came to: each is published, and the one that tells most of the run is kept."""

from __future__ import annotations

import weakref
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import msgspec

from memlog._internal.safe_files import replacing
from memlog.events import Event
from memlog.events import Trace as TraceEvent
from memlog.reports.traced_steps import WORSE
from memlog.trace.records import Trace
from memlog.tracer.schedule.iteration import OptimizerRefs

_PART = (
    "The trace is not of a whole training iteration: an optimizer takes part that made no step in it, so "
    "peaks are lower bounds."
)

FROZEN_START_MISSED = (
    "The trace begins at the first module that is called with gradients; others were called before it in the "
    "same step, and what they allocated is not in it, so peaks are lower bounds."
)


class StepTrace(NamedTuple):
    """A trace."""

    trace: Trace
    event: TraceEvent
    """What is published of it."""
    members: OptimizerRefs
    """The optimizers that stepped in it."""
    whole: bool
    """Whether it covers a training iteration, as far as one is known."""
    warm: bool
    """Whether each of them had its state before."""

    @property
    def rank(self) -> int:
        """How much it tells of the steps that were not traced."""
        return self.whole + (self.whole and self.warm)

    def as_partial(self, why: str = _PART) -> StepTrace:
        """The same, which says that it covers a part of an iteration alone."""
        result = self.trace.result
        exactness = "lower bound" if result.exactness == "exact" else result.exactness
        told = msgspec.structs.replace(result, exactness=exactness, unseen=(*result.unseen, why))
        trace = msgspec.structs.replace(self.trace, result=told)
        event = msgspec.structs.replace(self.event, exact=False)
        return self._replace(trace=trace, event=event, whole=False)


class KeptTrace:
    """Keeps and publishes.

    Args:
        kept: Where the events of the step that is kept are left: the helper process makes a flame graph of
            them.
        publish: Takes the trace events.

    Attributes:
        members: The optimizers that stepped in the trace that is kept.
    """

    def __init__(self, kept: Path, publish: Callable[[Event], object]) -> None:
        self.members: OptimizerRefs = ()
        self._file = kept
        self._publish = publish
        self._rank = self._peak = -1
        self._undecided: tuple[StepTrace, bool] | None = None

    def add(self, step_trace: StepTrace, *, outdated: bool = False) -> None:
        """A step was traced.

        Args:
            step_trace: What came of it.
            outdated: Whether an optimizer takes part now that made no step in the trace that is kept.
        """
        if outdated:
            self._rank = -1
        self._keep_if_more_representative(step_trace)
        self._publish(step_trace.event)

    def add_undecided(self, step_trace: StepTrace, *, whole: bool) -> None:
        """The first was, and whether it was whole the next optimizer's step tells: this one's, or another's.

        Args:
            step_trace: As if it was.
            whole: What is thought meanwhile.
        """
        self._undecided = step_trace, whole
        self._keep_if_more_representative(step_trace if whole else step_trace.as_partial())

    def optimizer_begins(self, optimizer: Any) -> None:
        """The next step begins."""
        if self._undecided is not None:
            members = self._undecided[0].members
            self._decide(whole=any(member() is optimizer for member in members))

    def step_ended(self) -> None:
        """Another step is over, and no optimizer was heard of: the user says what a step is."""
        if self._undecided is not None:
            self._decide(whole=self._undecided[1])

    def optimizer_ended(self, optimizer: Any) -> None:
        """A step is over: that in which the first trace began, where none has begun in it."""
        if self._undecided is not None and not self._undecided[0].members:
            step_trace, whole = self._undecided
            self._undecided = step_trace._replace(members=(weakref.ref(optimizer),)), whole

    def finish(self, *, outdated: bool) -> None:
        """No step comes any more.

        Args:
            outdated: As `add` takes it.
        """
        if self._undecided is not None:
            self._decide(whole=self._undecided[1])
        if outdated and self._rank > 0:
            kept = msgspec.msgpack.decode(self._file.read_bytes(), type=tuple[TraceEvent, Trace])
            event, trace = kept
            self._keep(StepTrace(trace, event, self.members, whole=True, warm=False).as_partial())

    def _decide(self, *, whole: bool) -> None:
        if self._undecided is None:
            return
        (step_trace, thought), self._undecided = self._undecided, None
        decided = step_trace if whole else step_trace.as_partial()
        if whole != thought:
            self._keep(decided)
        self._publish(decided.event)

    def _keep_if_more_representative(self, step_trace: StepTrace) -> None:
        """A whole iteration tells more than a part, and one with the optimizer's state more than the first.

        Unless the first needed more all the same: its input was larger. A step that failed was the last: it
        is kept where it needed more than any before.
        """
        peak = step_trace.event.peak
        if peak is None:
            return
        larger = peak > self._peak * WORSE
        failed = step_trace.event.step is None and step_trace.event.exact
        same = step_trace.rank == self._rank or failed
        fuller = step_trace.rank > self._rank and (self._rank < 1 or peak > self._peak / WORSE)
        if (same and larger) or fuller:
            self._keep(step_trace)

    def _keep(self, step_trace: StepTrace) -> None:
        """Leaves the events to the helper process: making a graph of them takes longer than a step."""
        self.members = step_trace.members
        self._rank, self._peak = step_trace.rank, step_trace.event.peak or 0
        with replacing(self._file.parent, self._file.name) as file:
            file.write(msgspec.msgpack.encode((step_trace.event, step_trace.trace)))

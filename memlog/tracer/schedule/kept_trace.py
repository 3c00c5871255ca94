"""What a session's traces came to: each is published, and the one that tells most of the run is kept."""

from __future__ import annotations

import weakref
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import msgspec

from memlog._internal.safe_files import replacing
from memlog.events import Event, Trace
from memlog.reports.traced_steps import WORSE
from memlog.trace.records import RecordedTrace
from memlog.tracer.schedule.iteration import Members

_PART = (
    "The trace is not of a whole training iteration: an optimizer takes part that made no step in it, so "
    "peaks are lower bounds."
)

FORERUNNER_MISSED = (
    "The trace begins at the first module that is called with gradients; others were called before it in the "
    "same step, and what they allocated is not in it, so peaks are lower bounds."
)


class Found(NamedTuple):
    """A trace."""

    trace: RecordedTrace
    event: Trace
    """What is published of it."""
    members: Members
    """The optimizers that stepped in it."""
    whole: bool
    """Whether it covers a training iteration, as far as one is known."""
    warm: bool
    """Whether each of them had its state before."""

    @property
    def rank(self) -> int:
        """How much it tells of the steps that were not traced."""
        return self.whole + (self.whole and self.warm)

    def of_a_part(self, why: str = _PART) -> Found:
        """The same, which says that it covers a part of an iteration alone."""
        result = self.trace.result
        exactness = "lower bound" if result.exactness == "exact" else result.exactness
        told = msgspec.structs.replace(result, exactness=exactness, unseen=(*result.unseen, why))
        trace = msgspec.structs.replace(self.trace, result=told)
        event = msgspec.structs.replace(self.event, exact=False)
        return self._replace(trace=trace, event=event, whole=False)


class Findings:
    """Keeps and publishes.

    Args:
        kept: Where the events of the step that is kept are left: the helper process makes a flame graph of
            them.
        publish: Takes the trace events.

    Attributes:
        members: The optimizers that stepped in the trace that is kept.
    """

    def __init__(self, kept: Path, publish: Callable[[Event], object]) -> None:
        self.members: Members = ()
        self._file = kept
        self._publish = publish
        self._rank = self._peak = -1
        self._undecided: tuple[Found, bool] | None = None

    def add(self, found: Found, *, lacking: bool = False) -> None:
        """A step was traced.

        Args:
            found: What came of it.
            lacking: Whether an optimizer takes part now that made no step in the trace that is kept.
        """
        if lacking:
            self._rank = -1
        self._keep_if_it_tells_more(found)
        self._publish(found.event)

    def add_undecided(self, found: Found, *, whole: bool) -> None:
        """The first was, and whether it was whole the next optimizer's step tells: this one's, or another's.

        Args:
            found: As if it was.
            whole: What is thought meanwhile.
        """
        self._undecided = found, whole
        self._keep_if_it_tells_more(found if whole else found.of_a_part())

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
            found, whole = self._undecided
            self._undecided = found._replace(members=(weakref.ref(optimizer),)), whole

    def finish(self, *, lacking: bool) -> None:
        """No step comes any more.

        Args:
            lacking: As `add` takes it.
        """
        if self._undecided is not None:
            self._decide(whole=self._undecided[1])
        if lacking and self._rank > 0:
            kept = msgspec.msgpack.decode(self._file.read_bytes(), type=tuple[Trace, RecordedTrace])
            event, trace = kept
            self._keep(Found(trace, event, self.members, whole=True, warm=False).of_a_part())

    def _decide(self, *, whole: bool) -> None:
        if self._undecided is None:
            return
        (found, thought), self._undecided = self._undecided, None
        decided = found if whole else found.of_a_part()
        if whole != thought:
            self._keep(decided)
        self._publish(decided.event)

    def _keep_if_it_tells_more(self, found: Found) -> None:
        """A whole iteration tells more than a part, and one with the optimizer's state more than the first.

        Unless the first needed more all the same: its input was larger. A step that failed was the last: it
        is kept where it needed more than any before.
        """
        peak = found.event.peak
        if peak is None:
            return
        larger = peak > self._peak * WORSE
        failed = found.event.step is None and found.event.exact
        same = found.rank == self._rank or failed
        fuller = found.rank > self._rank and (self._rank < 1 or peak > self._peak / WORSE)
        if (same and larger) or fuller:
            self._keep(found)

    def _keep(self, found: Found) -> None:
        """Leaves the events to the helper process: making a graph of them takes longer than a step."""
        self.members, self._rank, self._peak = found.members, found.rank, found.event.peak or 0
        with replacing(self._file.parent, self._file.name) as file:
            file.write(msgspec.msgpack.encode((found.event, found.trace)))

"""The course of a traced step: when each storage lived, and what ran meanwhile.

Moments are indices into the trace's stream of events; -1 is before it.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Iterable, Mapping
from typing import NamedTuple

from memlog.trace import encoding
from memlog.trace.encoding import (
    BACKWARD,
    BEFORE,
    FORWARD,
    OPTIMIZER,
    OPTIMIZER_STATE,
    PARAMETER,
    RECOMPUTE,
    TEMPORARY,
    UNDECIDED,
    StreamEvent,
)
from memlog.trace.records import Trace
from memlog.trace.storage_uses import NOTHING_KNOWN, uses_of

START = -1


class StorageLifetime:
    """A storage, from when it is made to when it is gone."""

    __slots__ = ("begin", "category", "end", "heard", "layer", "phase", "size", "thread", "uses")

    def __init__(self, event: StreamEvent, at: int, end: int) -> None:
        self.begin = START if event.phase == BEFORE else at
        self.heard = at
        """When its category was last told: of an optimizer's state, as the optimizer stepped."""
        self.end = end
        self.size = event.size
        self.layer = event.layer
        self.phase = event.phase
        self.category = event.category
        self.thread = event.thread
        self.uses = NOTHING_KNOWN

    @property
    def passing(self) -> bool:
        """Whether it is an activation or a temporary, rather than anything that outlives the step."""
        return self.category in (UNDECIDED, TEMPORARY)


class Call(NamedTuple):
    """One run of a module's ``forward``."""

    layer: int
    phase: int
    begin: int
    end: int
    thread: int
    inputs: tuple[StorageLifetime, ...] | None
    """The storages of its positional arguments that are followed, the largest two; ``None``: it got none of
    them so, or the trace does not tell."""


class Turn(NamedTuple):
    """From here on what a thread does outside modules belongs to a layer and a phase."""

    at: int
    layer: int
    phase: int


class StepInterval(NamedTuple):
    """From one moment to another."""

    begin: int
    end: int


class Span(NamedTuple):
    """So many bytes from one moment to another."""

    begin: int
    end: int
    size: float


class Course:
    """A trace's stream of events, put together.

    Args:
        trace: All of whose events are there one by one.

    Attributes:
        trace: It.
        lives: Every storage, in the order in which they are heard of.
        calls: Every call of a module, in the order in which they end.
        turns: Every change outside modules, in order.
        steps: When optimizers stepped, in order; each to the moment before its end.
        opened: When the first module was called, or what runs outside modules first changed its owner.
        length: Number of events, which is also the end of what is never freed.
        tells_inputs: Whether the trace says what modules were called with; those of an older memlog don't.
    """

    def __init__(self, trace: Trace) -> None:
        self.trace = trace
        self.lives: list[StorageLifetime] = []
        self.calls: list[Call] = []
        self.turns: list[Turn] = []
        self.steps: list[StepInterval] = []
        self.length = len(trace.events) // encoding.EVENT_BYTES
        self._live: dict[int, StorageLifetime] = {}
        self._serials: list[int] = []
        self._made: list[int] = []
        self.tells_inputs = False
        self._open: dict[int, list[Call]] = {}
        for at, event in enumerate(encoding.decode(trace.events)):
            self._take(at, event)
        self._note_state()
        starts = [*(call.begin for call in self.calls), *(turn.at for turn in self.turns)]
        self.opened = min(starts, default=self.length)
        self._in_order = sorted(self.lives, key=lambda life: life.begin)
        self._begins = [life.begin for life in self._in_order]

    @property
    def has_backward(self) -> bool:
        """Whether a backward pass was seen."""
        return any(turn.phase == BACKWARD for turn in self.turns)

    def made_after(self, serial: int) -> int:
        """When the first storage after one was made, by its serial; the course's length where none was."""
        following = bisect_right(self._serials, serial)
        return self._made[following] if following < len(self._made) else self.length

    def made_during(self, call: Call) -> list[StorageLifetime]:
        """The storages that a call's thread makes in it, in order."""
        first, last = (bisect_left(self._begins, at) for at in (call.begin, call.end))
        return [life for life in self._in_order[first:last] if life.thread == call.thread]

    def outermost(self) -> list[Call]:
        """The calls in a forward pass that lie in no other."""
        found: list[Call] = []
        for call in reversed(self.calls):
            if call.phase == FORWARD and all(
                not (other.begin < call.begin < other.end and other.thread == call.thread)
                for other in found[-1:]
            ):
                found.append(call)
        return found

    def step_of(self, at: int) -> int:
        """The number of the optimizer's step to which a moment leads, or in which it lies."""
        return bisect_right(self.steps, at, key=lambda step: step.end)

    def between_steps(self, at: int) -> StepInterval:
        """From the optimizer's step before a moment to the one after: the passes whose gradients it takes."""
        number = self.step_of(at)
        begin = self.steps[number - 1].end if number else START
        return StepInterval(
            begin, self.steps[number].begin if number < len(self.steps) else self.length
        )

    def turns_before(self, at: int) -> int:
        """How many turns were before a moment."""
        return bisect_left(self.turns, at, key=lambda turn: turn.at)

    def backward_after(self, at: int) -> int:
        """When the first backward pass after a moment begins; the course's length where there is none."""
        for turn in self.turns[self.turns_before(at) :]:
            if turn.phase == BACKWARD:
                return turn.at
        return self.length

    def turn_after(self, at: int) -> int:
        """When what runs outside modules next changes its owner; the course's length where it does not."""
        following = self.turns_before(at + 1)
        return self.turns[following].at if following < len(self.turns) else self.length

    def path(self, layer: int) -> str:
        """A layer's path."""
        return self.trace.paths[layer]

    def kind(self, layer: int) -> str:
        """The name of its class; empty where unknown."""
        return self.trace.kinds[layer] if layer < len(self.trace.kinds) else ""

    def below(self, layer: int) -> frozenset[int]:
        """A layer and those inside it."""
        if layer == 1:
            return frozenset(range(1, len(self.trace.paths)))
        inside = f"{self.path(layer)}."
        return frozenset(
            {layer, *(n for n, path in enumerate(self.trace.paths) if path.startswith(inside))}
        )

    def parameters(self) -> dict[int, list[int]]:
        """Sizes of the parameters of each layer that has any."""
        found: dict[int, list[int]] = {}
        for life in self.lives:
            if life.category == PARAMETER:
                found.setdefault(life.layer, []).append(life.size)
        return found

    def recomputed(self) -> set[int]:
        """Layers that run their forward again in the backward pass: they are checkpointed."""
        return {call.layer for call in self.calls if call.phase == RECOMPUTE}

    def module_stack(self, sizes: Mapping[StorageLifetime, float] | None = None) -> list[Span]:
        """When how much lived.

        Args:
            sizes: Sizes other than the storages' own.
        """
        changed = sizes or {}
        return [
            Span(steady_begin(life), life.end, changed.get(life, life.size)) for life in self.lives
        ]

    def _take(self, at: int, event: StreamEvent) -> None:
        if event.kind == encoding.ALLOC:
            life = self._live[event.key] = StorageLifetime(event, at, self.length)
            self._number(at, event.key)
            self.lives.append(life)
        elif event.kind in (encoding.FREE, encoding.USES):
            self._last_word(at, event)
        elif event.kind == encoding.CLASSIFY:
            self._classify(at, event)
        elif event.kind == encoding.PHASE_CHANGE:
            self._turn(Turn(at, event.layer, event.phase))
        elif event.kind == encoding.ENTER:
            self._enter(at, event)
        elif event.kind == encoding.EXIT:
            self._exit(at, event)

    def _number(self, at: int, serial: int) -> None:
        if not self._serials or serial > self._serials[-1]:
            self._serials.append(serial)
            self._made.append(at)

    def _last_word(self, at: int, event: StreamEvent) -> None:
        """A storage is freed, or is there as the trace ends."""
        life = self._live.get(event.key)
        if life is not None:
            life.uses = uses_of(event)
            if event.kind == encoding.FREE:
                life.end = at
                del self._live[event.key]

    def _note_state(self) -> None:
        """What an optimizer's step makes and keeps is its state, also where the trace ends within it."""
        for life in self._live.values():
            if life.phase == OPTIMIZER and life.passing:
                life.category = OPTIMIZER_STATE

    def _classify(self, at: int, event: StreamEvent) -> None:
        life = self._live.get(event.key)
        if life is not None:
            life.category, life.heard = event.category, at
            if event.layer != encoding.OUTSIDE:
                life.layer = event.layer

    def _turn(self, turn: Turn) -> None:
        if self.turns and self.turns[-1].phase == OPTIMIZER:
            self.steps[-1] = self.steps[-1]._replace(end=turn.at)
        if turn.phase == OPTIMIZER:
            self.steps.append(StepInterval(turn.at, self.length))
        self.turns.append(turn)

    def _enter(self, at: int, event: StreamEvent) -> None:
        self.tells_inputs = self.tells_inputs or event.key > 0
        inputs = tuple(
            life
            for life in (self._live.get(event.key), self._live.get(event.size))
            if life is not None
        )
        call = Call(
            event.layer,
            event.phase,
            at,
            self.length,
            event.thread,
            None if event.key < 0 else inputs,
        )
        self._open.setdefault(event.thread, []).append(call)

    def _exit(self, at: int, event: StreamEvent) -> None:
        opened = self._open.get(event.thread, [])
        if all(call.layer != event.layer for call in opened):
            return  # it began before the trace did
        while True:
            call = opened.pop()
            self.calls.append(call._replace(end=at))
            if call.layer == event.layer:
                return


def steady_begin(life: StorageLifetime) -> int:
    """When it begins in a step that is not the first: the optimizer's state is there from then on."""
    return START if life.category == OPTIMIZER_STATE else life.begin


def highest(
    module_stack: Iterable[Span], length: int, spikes: Iterable[tuple[int, float]] = ()
) -> int:
    """The highest level of all spans together.

    Args:
        module_stack: They last to the moment before their end.
        length: Of the course.
        spikes: At a moment, so much more for an instant than there was just before it.

    Returns:
        Bytes.
    """
    changes = [0.0] * (length + 2)  # the first is START
    for begin, end, size in module_stack:
        changes[begin + 1] += size
        # A use after the last allocation would end one moment after the course.
        changes[min(end, length) + 1] -= size
    above = dict[int, float]()
    for at, size in spikes:
        above[at + 1] = max(size, above.get(at + 1, 0.0))
    level = peak = 0.0
    for at, change in enumerate(changes):
        if at in above:
            peak = max(peak, level + above[at])
        level += change
        peak = max(peak, level)
    return round(peak)

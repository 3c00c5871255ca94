"""Lifetimes of a traced step's storages, and the calls and phases around them.

A moment is the index of an event in the trace's stream; -1 is the time before the first event.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Iterable, Mapping
from collections.abc import Set as AbstractSet
from copy import copy
from operator import attrgetter
from typing import Any, NamedTuple

from memlog.trace import encoding
from memlog.trace.encoding import (
    BACKWARD,
    BEFORE,
    FORWARD,
    OPTIMIZER,
    OPTIMIZER_STATE,
    PARAMETER,
    TEMPORARY,
    UNDECIDED,
    WORKSPACE,
    StreamEvent,
)
from memlog.trace.records import NOTHING_KNOWN, RecordedTrace, uses_of

BEFORE_TRACE = -1


class ParameterKey(NamedTuple):
    """Layer and size in bytes. A parameter, its gradient and its optimizer state have the same key."""

    layer: int
    size: int


class StorageLifetime:
    """A storage, from its allocation to its free."""

    def __init__(self, event: StreamEvent, at: int, end: int) -> None:
        self.begin = BEFORE_TRACE if event.phase == BEFORE else at
        self.classified_at = at
        """Moment of the last event that set the category. For optimizer state, `TracedStep.optimizer_step_at`
        finds from this moment the step that uses the state, if the trace contains the step."""
        self.end = end
        self.size = event.size
        self.layer = event.layer
        self.phase = event.phase
        self.category = event.category
        self.thread = event.thread
        self.uses = NOTHING_KNOWN
        self.cached = False
        """True for autocast's copy of a parameter, which a cache keeps to the end of the forward pass."""

    def changed(self, **fields: Any) -> StorageLifetime:
        """Return a copy of which some attributes have other values."""
        storage = copy(self)
        vars(storage).update(fields)
        return storage

    @property
    def transient(self) -> bool:
        """True for activations and temporaries. These storages do not outlive the step."""
        return self.category in (UNDECIDED, TEMPORARY)

    @property
    def key(self) -> ParameterKey:
        return ParameterKey(self.layer, self.size)


class LayerCall(NamedTuple):
    """One run of a module's ``forward``."""

    layer: int
    phase: int
    begin: int
    end: int
    thread: int
    inputs: tuple[StorageLifetime, ...] | None
    """Known storages of the two largest positional tensor arguments; ``None`` if no positional argument is a
    tensor."""


class PhaseChange(NamedTuple):
    """Begin of work outside ``forward``: its moment, layer and phase."""

    at: int
    layer: int
    phase: int


class Interval(NamedTuple):
    begin: int
    end: int


class SizedInterval(NamedTuple):
    """Bytes that are live from one moment to another."""

    begin: int
    end: int
    size: float


class _StreamReader:
    def __init__(self, length: int) -> None:
        self.storages: list[StorageLifetime] = []
        self.calls: list[LayerCall] = []
        self.phase_changes: list[PhaseChange] = []
        self.optimizer_steps: list[Interval] = []
        self.serials: list[int] = []
        self.allocated_at: list[int] = []
        self._length = length
        self._live: dict[int, StorageLifetime] = {}
        self._running: dict[int, list[LayerCall]] = {}

    def apply(self, at: int, event: StreamEvent) -> None:
        if event.kind == encoding.ALLOC:
            storage = self._live[event.key] = StorageLifetime(event, at, self._length)
            self.storages.append(storage)
            # In ascending order only, because `allocated_after` bisects the serials.
            if not self.serials or event.key > self.serials[-1]:
                self.serials.append(event.key)
                self.allocated_at.append(at)
        elif event.kind in (encoding.FREE, encoding.USES):
            self._end(at, event)
        elif event.kind == encoding.CLASSIFY:
            self._classify(at, event)
        elif event.kind == encoding.PHASE_CHANGE:
            self._change_phase(PhaseChange(at, event.layer, event.phase))
        elif event.kind == encoding.ENTER:
            self._enter(at, event)
        elif event.kind == encoding.EXIT:
            self._exit(at, event)

    def finish(self) -> None:
        """Classify a storage as optimizer state if an optimizer step allocated it and no event freed it.

        If the trace ends within an optimizer step, the trace lacks the events that classify this state.
        """
        for storage in self._live.values():
            if storage.phase == OPTIMIZER and storage.transient:
                storage.category = OPTIMIZER_STATE

    def _end(self, at: int, event: StreamEvent) -> None:
        storage = self._live.get(event.key)
        if storage is not None:
            storage.uses = uses_of(event)
            if event.kind == encoding.FREE:
                storage.end = at
                del self._live[event.key]

    def _classify(self, at: int, event: StreamEvent) -> None:
        storage = self._live.get(event.key)
        if storage is not None:
            storage.category, storage.classified_at = event.category, at
            if event.layer != encoding.OUTSIDE:
                storage.layer = event.layer

    def _change_phase(self, change: PhaseChange) -> None:
        if self.phase_changes and self.phase_changes[-1].phase == OPTIMIZER:
            self.optimizer_steps[-1] = self.optimizer_steps[-1]._replace(end=change.at)
        if change.phase == OPTIMIZER:
            self.optimizer_steps.append(Interval(change.at, self._length))
        self.phase_changes.append(change)

    def _enter(self, at: int, event: StreamEvent) -> None:
        serials = (event.key, event.size)
        known = tuple(self._live[serial] for serial in serials if serial in self._live)
        inputs = None if event.key < 0 else known
        call = LayerCall(event.layer, event.phase, at, self._length, event.thread, inputs)
        self._running.setdefault(event.thread, []).append(call)

    def _exit(self, at: int, event: StreamEvent) -> None:
        running = self._running.get(event.thread, [])
        if all(call.layer != event.layer for call in running):
            return  # the call began before the trace did
        while True:
            call = running.pop()
            self.calls.append(call._replace(end=at))
            if call.layer == event.layer:
                return


class TracedStep:
    """A traced step, read from the events of a complete trace.

    Attributes:
        paths: Paths of the layers, by the layer's number.
        storages: Every storage, in the order of their ALLOC events.
        calls: Every call of a module, in the order in which they end.
        optimizer_steps: Interval of each optimizer step, in order. An interval's ``end`` is after the step.
        first_activity: Moment of the first call of a module, or of the first phase change if it is earlier.
        length: Number of events. The ``end`` of a storage that is never freed has this value, too.
    """

    def __init__(self, trace: RecordedTrace) -> None:
        self.trace = trace
        self.paths = trace.paths
        self.length = len(trace.events) // encoding.EVENT_BYTES
        stream = _StreamReader(self.length)
        for at, event in enumerate(encoding.decode(trace.events)):
            stream.apply(at, event)
        stream.finish()
        self.calls = stream.calls
        self.optimizer_steps = stream.optimizer_steps
        self._phase_changes = stream.phase_changes
        self._serials = stream.serials
        self._allocated_at = stream.allocated_at
        starts = [call.begin for call in self.calls]
        starts += [change.at for change in self._phase_changes]
        self.first_activity = min(starts, default=self.length)
        self.set_storages(stream.storages)

    def set_storages(self, storages: list[StorageLifetime]) -> None:
        self.storages = storages
        # The sort is stable: of storages with one beginning, those that were added stay first.
        self._by_begin = sorted(storages, key=_begin)
        self._begins = [storage.begin for storage in self._by_begin]

    def with_storages(
        self,
        changed: Mapping[StorageLifetime, StorageLifetime],
        added: Iterable[StorageLifetime] = (),
        removed: AbstractSet[StorageLifetime] = frozenset(),
    ) -> TracedStep:
        """Return the step with other storages. Its calls, phases and moments are the same.

        Of storages that begin at the same moment, those in ``added`` come first.
        """
        step = copy(self)
        kept = (storage for storage in self.storages if storage not in removed)
        step.set_storages([*added, *(changed.get(storage, storage) for storage in kept)])
        step.calls = [
            call._replace(inputs=tuple(changed.get(storage, storage) for storage in call.inputs))
            if call.inputs
            else call
            for call in self.calls
        ]
        return step

    @property
    def peak(self) -> int:
        """Peak in bytes, if the optimizer's state exists from the start."""
        return highest(self.intervals(), self.length)

    def kind(self, layer: int) -> str:
        """Return the name of a layer's class; empty if unknown."""
        kinds = self.trace.kinds
        return kinds[layer] if layer < len(kinds) else ""

    def subtree(self, layer: int) -> frozenset[int]:
        """Return the numbers of a layer and all layers inside it."""
        if layer == 1:
            return frozenset(range(1, len(self.paths)))
        inside = f"{self.paths[layer]}."
        return frozenset(
            {layer, *(n for n, path in enumerate(self.paths) if path.startswith(inside))}
        )

    @property
    def has_backward(self) -> bool:
        return any(change.phase == BACKWARD for change in self._phase_changes)

    def allocated_after(self, serial: int) -> int:
        """Return the moment of the first allocation after the allocation of the storage ``serial``.

        Return `length` if there is no later allocation.
        """
        following = bisect_right(self._serials, serial)
        return self._allocated_at[following] if following < len(self._allocated_at) else self.length

    def allocated_during(self, call: LayerCall) -> list[StorageLifetime]:
        """Return the storages that a call's thread allocates during the call, in order."""
        first, last = (bisect_left(self._begins, at) for at in (call.begin, call.end))
        return [storage for storage in self._by_begin[first:last] if storage.thread == call.thread]

    def outermost_calls(self) -> list[LayerCall]:
        """Return the outermost calls of the forward passes, the last call first."""
        outermost: list[LayerCall] = []
        for call in reversed(self.calls):
            # The calls come in descending order of their ends, so the newest outermost call can
            # contain this one.
            inside = any(
                other.begin < call.begin < other.end and other.thread == call.thread
                for other in outermost[-1:]
            )
            if call.phase == FORWARD and not inside:
                outermost.append(call)
        return outermost

    def optimizer_step_at(self, at: int) -> int:
        """Return the index of the first optimizer step that ends after the moment ``at``.

        If all optimizer steps have ended, return the number of optimizer steps.
        """
        return bisect_right(self.optimizer_steps, at, key=lambda step: step.end)

    def between_steps(self, at: int) -> Interval:
        """Return the longest interval around ``at`` that contains no optimizer step.

        The next optimizer step uses the gradients of all backward passes in the interval. If ``at`` lies in
        an optimizer step, return the interval before this step.
        """
        number = self.optimizer_step_at(at)
        steps = self.optimizer_steps
        return Interval(
            steps[number - 1].end if number else BEFORE_TRACE,
            steps[number].begin if number < len(steps) else self.length,
        )

    def phase_changes_before(self, at: int) -> list[PhaseChange]:
        return self._phase_changes[: bisect_left(self._phase_changes, at, key=_moment)]

    def phase_changes_from(self, at: int) -> list[PhaseChange]:
        return self._phase_changes[bisect_left(self._phase_changes, at, key=_moment) :]

    def backward_after(self, at: int) -> int:
        """Return the moment at which the first backward pass after ``at`` begins.

        Return `length` if there is none.
        """
        changes = self.phase_changes_from(at)
        return next((change.at for change in changes if change.phase == BACKWARD), self.length)

    def next_phase_change(self, at: int) -> int:
        """Return the moment of the first phase change after ``at``, or `length` if there is none."""
        return next((change.at for change in self.phase_changes_from(at + 1)), self.length)

    def parameters(self) -> dict[int, list[int]]:
        """Return the bytes of each parameter, by layer."""
        sizes: dict[int, list[int]] = {}
        for storage in self.storages:
            if storage.category == PARAMETER:
                sizes.setdefault(storage.layer, []).append(storage.size)
        return sizes

    def intervals(self, ends: Mapping[StorageLifetime, int] | None = None) -> list[SizedInterval]:
        """Return each storage's interval, which begins at `steady_begin`, and its bytes.

        ``ends`` holds new ends for some storages.
        """
        ends = ends or {}
        return [
            SizedInterval(steady_begin(storage), ends.get(storage, storage.end), storage.size)
            for storage in self.storages
        ]


_moment = attrgetter("at")
_begin = attrgetter("begin")


def steady_begin(storage: StorageLifetime) -> int:
    """Return the moment at which a storage begins.

    Optimizer state and workspaces count from the step's start, because they exist from the second step on.
    """
    return BEFORE_TRACE if storage.category in (OPTIMIZER_STATE, WORKSPACE) else storage.begin


def highest(
    intervals: Iterable[SizedInterval], length: int, spikes: Iterable[tuple[int, float]] = ()
) -> int:
    """Compute the highest number of bytes that are live at one moment.

    The ``end`` of an interval does not belong to it. ``length`` is the number of events in the step.
    ``spikes`` are pairs of a moment and bytes that are live at this moment only. If there are several pairs
    for one moment, the largest counts.
    """
    changes = [0.0] * (length + 2)  # an index is a moment plus 1, because BEFORE_TRACE is -1
    for begin, end, size in intervals:
        changes[begin + 1] += size
        # A use after the last allocation would end one moment after the step.
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

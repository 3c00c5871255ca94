"""Accounting of a trace: totals per layer and per phase, and the storages that are live at the peak.

The backward pass does not call modules. So a layer's part of the pass begins and ends when the operations
change from one layer to another.

The accountant processes the stream in pieces and discards each piece. The first pass over a piece finds the
highest number of live bytes in the piece. If this number is a new peak, a second pass replays the piece up to
the peak and finds the storages that were live at the peak. So the figures are exact for a trace of any
length. The memory that the accountant uses grows with the live storages only.

Live bytes count from 0 at the start of the trace. Bytes from before the trace are added at the end of the
accounting, because some of them become known late. For example, an optimizer's state becomes known when the
optimizer first steps in the trace.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Literal, TypeAlias, get_args

import msgspec

from memlog.trace import encoding
from memlog.trace.encoding import (
    ACTIVATION,
    BACKWARD,
    BEFORE,
    FORWARD,
    OPTIMIZER,
    OTHER,
    OUTSIDE,
    RECOMPUTE,
    RECOMPUTED,
    TEMPORARY,
    UNDECIDED,
    WORKSPACE,
    StreamEvent,
)
from memlog.trace.records import RecordedTrace

LayersAround = Callable[[int], Sequence[int]]
"""Function that returns a layer's number and the numbers of all layers that contain the layer. For work
outside all modules, it returns no number."""


class BackwardParts:
    """Parts of one thread's backward pass, and the bytes that each part adds.

    A part is an uninterrupted time in which the backward pass runs operations of one layer, or of layers
    inside this layer. When a part ends, ``added`` is called with the layer and the added bytes.
    """

    def __init__(self, layers_around: LayersAround, added: Callable[[int, int], object]) -> None:
        self._layers_around = layers_around
        self._added = added
        self._open: dict[int, int] = {}
        """Live bytes at the beginning of each part that has not ended, by layer."""
        self._peaks: dict[int, int] = {}

    def begin(self, layer: int, live: int) -> None:
        """Begin the parts of a layer and of all layers that contain it. End the parts of all other layers.

        A part that has already begun continues. ``live`` is the current number of live bytes.
        """
        around = self._layers_around(layer)
        # A list, because the loop removes entries from the dictionary.
        for interrupted in [known for known in self._open if known not in around]:
            self._end(interrupted)
        for containing in around:
            self._open.setdefault(containing, live)
            self._peaks.setdefault(containing, live)

    def reach(self, live: int) -> None:
        """Set the peak of each open part to ``live`` bytes if the peak is lower."""
        for layer, peak in self._peaks.items():
            if live > peak:
                self._peaks[layer] = live

    def end(self) -> None:
        for layer in list(self._open):
            self._end(layer)

    def _end(self, layer: int) -> None:
        self._added(layer, self._peaks.pop(layer) - self._open.pop(layer))


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


PIECE = 8192
"""Number of events in a piece."""
_OF_THE_ALLOCATOR = (WORKSPACE, OTHER)
"""Categories of bytes that count for no layer if an ALLOC in the trace has them. torch makes a workspace in
the first module that needs one, and keeps it for all others. OTHER is the end of an unsplit block."""


@dataclass(slots=True, eq=False)
class LiveStorage:
    """A storage, live or freed."""

    size: int
    layer: int
    phase: int
    category: int
    line: int = 0
    alive: bool = True

    @property
    def final_category(self) -> int:
        """Category of the storage. If ``category`` is undecided, the storage's phase decides."""
        if self.category != UNDECIDED:
            return self.category
        if self.phase == BEFORE:
            return OTHER
        return RECOMPUTED if self.phase == RECOMPUTE else TEMPORARY


@dataclass(slots=True, eq=False)
class LayerPhase:
    """Figures of one layer in one phase."""

    calls: int = 0
    allocations: int = 0
    allocated: int = 0
    frees: int = 0
    peak: int | None = None
    kept: int = 0
    time_ns: int = 0
    readings: int = 0
    reserved_peak: int = 0
    unused_share: float = 0.0
    """Sum of ``(reserved - allocated) / reserved`` over the readings."""

    def raise_peak(self, level: int) -> None:
        if self.peak is None or level > self.peak:
            self.peak = level


class _Frame:
    """A module that is running, or a sequence of operations outside all modules.

    ``peak`` is the highest number of live bytes. ``own_peak`` and ``own_at_entry`` exclude the categories in
    `_OF_THE_ALLOCATOR`.
    """

    def __init__(self, layer: int, phase: int, began_ns: int, live: int, own: int) -> None:
        self.layer = layer
        self.phase = phase
        self.began_ns = began_ns
        self.peak = live
        self.own_peak = self.own_at_entry = own
        self.storages: list[LiveStorage] = []

    def add(self, storage: LiveStorage) -> None:
        self.storages.append(storage)
        # Without the freed ones, so that the list grows with the live storages only.
        if len(self.storages) >= PIECE:
            self.storages = [storage for storage in self.storages if storage.alive]

    def mark_activations(self) -> None:
        for storage in self.storages:
            undecided = storage.alive and storage.category == UNDECIDED
            if undecided and storage.phase != BACKWARD:
                storage.category = ACTIVATION
        self.storages = []


class _Frames:
    """The running modules of each thread. `Accountant` describes the attribute ``added``.

    Attributes:
        of_no_layer: Live bytes of the categories in `_OF_THE_ALLOCATOR`, minus those at the trace's start.
    """

    def __init__(
        self, rows: defaultdict[tuple[int, int], LayerPhase], layers_around: LayersAround
    ) -> None:
        self.added: dict[int, int] = {}
        self.of_no_layer = 0
        self._rows = rows
        self._stacks: dict[int, list[_Frame]] = {}
        self._backward = defaultdict[int, BackwardParts](
            lambda: BackwardParts(layers_around, self._raise_added)
        )

    def add(self, storage: LiveStorage, thread: int, live: int) -> None:
        """Add a storage to the innermost frame of ``thread``. ``live`` includes the storage's bytes."""
        self._stack(thread, live)[-1].add(storage)
        self.raise_peaks(live)

    def raise_peaks(self, live: int) -> None:
        own = live - self.of_no_layer
        for stack in self._stacks.values():
            frame = stack[-1]
            frame.peak = max(frame.peak, live)
            frame.own_peak = max(frame.own_peak, own)

    def _stack(self, thread: int, live: int) -> list[_Frame]:
        """Return a thread's frames. The first one stands for work outside all modules and is never closed."""
        stack = self._stacks.get(thread)
        if stack is None:
            stack = self._stacks[thread] = [self._frame(OUTSIDE, FORWARD, 0, live)]
        return stack

    def _frame(self, layer: int, phase: int, began_ns: int, live: int) -> _Frame:
        return _Frame(layer, phase, began_ns, live, live - self.of_no_layer)

    def enter(self, event: StreamEvent, live: int) -> None:
        frame = self._frame(event.layer, event.phase, event.time_ns, live)
        self._stack(event.thread, live).append(frame)

    def exit(self, event: StreamEvent, live: int) -> None:
        """Close a module's frame and all frames inside it. Ignore a call that began before the trace."""
        stack = self._stack(event.thread, live)
        if not any(frame.layer == event.layer for frame in stack[1:]):
            return
        closed = OUTSIDE
        while closed != event.layer:
            closed = stack[-1].layer
            self._close_innermost(event.thread, event.time_ns, live)

    def change_phase(self, event: StreamEvent, live: int) -> None:
        """Close the frame of the backward pass or optimizer step that ends.

        If another backward pass or optimizer step begins, open its frame.
        """
        stack = self._stack(event.thread, live)
        parts = self._backward[event.thread]
        if stack[-1].phase in (BACKWARD, OPTIMIZER):
            self._close_innermost(event.thread, event.time_ns, live)
        elif event.phase == BACKWARD:
            # A backward pass begins. Undecided storages that are still live are activations: the loss holds
            # them for this pass. On a device, the pass runs on a thread of autograd.
            for waiting in (stack, *self._stacks.values()):
                waiting[-1].mark_activations()
        if event.phase == BACKWARD:
            parts.begin(event.layer, live - self.of_no_layer)
        else:
            parts.end()
        if event.phase != FORWARD:
            stack.append(self._frame(event.layer, event.phase, event.time_ns, live))

    def close_all(self, time_ns: int, live: int) -> None:
        for thread, stack in self._stacks.items():
            while len(stack) > 1:
                self._close_innermost(thread, time_ns, live)
            stack[0].mark_activations()
            self._backward[thread].end()

    def _raise_added(self, layer: int, added: int) -> None:
        self.added[layer] = max(added, self.added.get(layer, added))

    def _close_innermost(self, thread: int, time_ns: int, live: int) -> None:
        stack = self._stacks[thread]
        frame = stack.pop()
        row = self._rows[frame.layer, frame.phase]
        row.calls += 1
        row.time_ns += time_ns - frame.began_ns
        row.kept += live - self.of_no_layer - frame.own_at_entry
        row.raise_peak(frame.peak)
        if frame.phase == BACKWARD:
            self._backward[thread].reach(frame.own_peak)
        elif frame.phase != OPTIMIZER:
            self._raise_added(frame.layer, frame.own_peak - frame.own_at_entry)
        if frame.phase == FORWARD:
            frame.mark_activations()
        # An inner call is a part of the outer one, so the outer peak is at least as high.
        around = stack[-1]
        around.peak = max(around.peak, frame.peak)
        around.own_peak = max(around.own_peak, frame.own_peak)


class Accountant:
    """The accounting of one trace.

    If ``by_readings`` is true, live bytes come from READING events, because the trace has no ALLOC events
    (engine ``sampler``). ``layers_around`` finds the layers that contain a layer. The default assumes that no
    layer contains another layer.

    Attributes:
        live_bytes: Number of live bytes after the processed events, minus the number at the trace's start.
        peak_bytes: The highest `live_bytes` so far.
        peak_ns: Time of the peak, in nanoseconds since the trace began.
        rows: Figures by layer and phase.
        added: Largest rise of the live bytes in each layer, inner layers included. A rise belongs to one call
            of the layer's forward, or to one uninterrupted part of the layer's backward pass.
        lines: Bytes allocated outside all modules, by the line's number in `RecordedTrace.lines`.
        unmatched_frees: Number of frees without a recorded allocation.
    """

    def __init__(
        self, *, by_readings: bool = False, layers_around: LayersAround = lambda layer: (layer,)
    ) -> None:
        self.live_bytes = 0
        self.before_bytes = 0
        self.peak_bytes = 0
        self.peak_ns = 0
        self.at_peak: list[LiveStorage] = []
        self.rows = defaultdict[tuple[int, int], LayerPhase](LayerPhase)
        self.lines: Counter[int] = Counter()
        self._last_ns = 0
        self.unmatched_frees = 0
        self._by_readings = by_readings
        self._first_reading: int | None = None
        self._live: dict[int, LiveStorage] = {}
        self._frames = _Frames(self.rows, layers_around)
        self.added = self._frames.added
        self._created: list[LiveStorage] = []
        self._index = 0
        self._peak_index = -1
        self._handlers = {
            encoding.ALLOC: self._alloc,
            encoding.FREE: self._free,
            encoding.ENTER: lambda event: self._frames.enter(event, self.live_bytes),
            encoding.EXIT: lambda event: self._frames.exit(event, self.live_bytes),
            encoding.PHASE_CHANGE: lambda event: self._frames.change_phase(event, self.live_bytes),
            encoding.CLASSIFY: self._classify,
            encoding.READING: self._reading,
            encoding.USES: lambda _: None,  # only predictions read it
            encoding.LINE: self._line,
        }

    def fold(self, events: bytes) -> None:
        step = PIECE * encoding.EVENT_BYTES
        for start in range(0, len(events), step):
            self._fold_piece(events[start : start + step])

    def finish(self) -> None:
        """Close all modules that run when the trace ends. `fold` must not be called afterwards."""
        self._frames.close_all(self._last_ns, self.live_bytes)

    def _fold_piece(self, piece: bytes) -> None:
        # A copy, because the second pass begins with the storages before this piece.
        live_before = dict(self._live)
        self._created = []
        self._peak_index = -1
        handlers = self._handlers
        for self._index, event in enumerate(encoding.decode(piece)):
            handlers[event.kind](event)
        self._last_ns = event.time_ns
        replayed = 0
        if self._peak_index >= 0:
            until_peak = piece[: (self._peak_index + 1) * encoding.EVENT_BYTES]
            self.at_peak, replayed = self._replay(live_before, until_peak)
        # Storages from before the trace were live at the peak too, even if their ALLOC comes later.
        self.at_peak += [storage for storage in self._created[replayed:] if storage.phase == BEFORE]

    def _replay(self, live: dict[int, LiveStorage], piece: bytes) -> tuple[list[LiveStorage], int]:
        """Apply the events in ``piece`` to ``live``. Return the live storages and the number of ALLOCs."""
        count = 0
        for event in encoding.decode(piece):
            if event.kind == encoding.ALLOC:
                live[event.key] = self._created[count]
                count += 1
            elif event.kind == encoding.FREE:
                live.pop(event.key, None)
        return list(live.values()), count

    def _alloc(self, event: StreamEvent) -> None:
        storage = LiveStorage(event.size, event.layer, event.phase, event.category)
        self._live[event.key] = storage
        self._created.append(storage)
        if event.phase == BEFORE:
            self.before_bytes += event.size
            return
        if event.category in _OF_THE_ALLOCATOR:
            self._alloc_outside_layers(event)
            return
        row = self.rows[event.layer, event.phase]
        row.allocations += 1
        row.allocated += event.size
        self.live_bytes += event.size
        row.raise_peak(self.live_bytes)
        self._raise_peak(event.time_ns)
        self._frames.add(storage, event.thread, self.live_bytes)

    def _alloc_outside_layers(self, event: StreamEvent) -> None:
        """Count bytes as live, but not as allocated by a module or by the program."""
        self._frames.of_no_layer += event.size
        self.live_bytes += event.size
        self._raise_peak(event.time_ns)
        self._frames.raise_peaks(self.live_bytes)

    def _raise_peak(self, time_ns: int) -> None:
        live = self.live_bytes
        if live > self.peak_bytes:
            self.peak_bytes, self.peak_ns, self._peak_index = live, time_ns, self._index

    def _free(self, event: StreamEvent) -> None:
        storage = self._live.pop(event.key, None)
        if storage is None:
            self.unmatched_frees += 1
            return
        storage.alive = False
        self.live_bytes -= storage.size
        if storage.category in _OF_THE_ALLOCATOR:
            self._frames.of_no_layer -= storage.size
        elif storage.phase != BEFORE:
            self.rows[storage.layer, storage.phase].frees += 1

    def _classify(self, event: StreamEvent) -> None:
        storage = self._live.get(event.key)
        if storage is None:
            return
        storage.category = event.category
        if event.layer != OUTSIDE:
            storage.layer = event.layer

    def _line(self, event: StreamEvent) -> None:
        storage = self._live.get(event.key)
        if storage is not None:
            storage.line = event.size
            self.lines[event.size] += storage.size

    def _reading(self, event: StreamEvent) -> None:
        allocated, reserved = event.key, event.size
        row = self.rows[event.layer, event.phase]
        if reserved > 0:
            row.readings += 1
            row.reserved_peak = max(row.reserved_peak, reserved)
            row.unused_share += (reserved - allocated) / reserved
        if not self._by_readings:
            return
        if self._first_reading is None:
            self._first_reading = self.before_bytes = allocated
        self.live_bytes = allocated - self._first_reading
        self._raise_peak(event.time_ns)
        self._frames.raise_peaks(self.live_bytes)

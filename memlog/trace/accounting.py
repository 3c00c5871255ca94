"""Keeps the books of a trace: takes the stream piece by piece and forgets each piece.

Two passes over each piece: the first finds where live bytes are highest, and only where that is higher than
ever before a second replays the piece to that point for who held what. So the books are exact however long
the trace is, while what is kept in memory grows with the live storages alone.

Live bytes are counted from the start of the trace, at which they are 0. What was there before is added at
the end, since it may become known late (an optimizer's state is seen when it first steps).
"""

from __future__ import annotations

from collections import Counter

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
    StreamEvent,
)

PIECE = 8192
"""Events that are worked on at a time."""


class LiveStorage:
    """A storage that is, or was, live."""

    __slots__ = ("alive", "category", "layer", "line", "phase", "size")

    def __init__(self, size: int, layer: int, phase: int, category: int) -> None:
        self.size = size
        self.layer = layer
        self.phase = phase
        self.category = category
        self.line = 0
        self.alive = True

    @property
    def final_category(self) -> int:
        """The category, with what nobody decided told by the phase."""
        if self.category != UNDECIDED:
            return self.category
        if self.phase == BEFORE:
            return OTHER
        return RECOMPUTED if self.phase == RECOMPUTE else TEMPORARY


class Row:
    """The figures of one layer in one phase."""

    __slots__ = (
        "allocated",
        "allocations",
        "calls",
        "frees",
        "kept",
        "peak",
        "readings",
        "reserved_peak",
        "time_ns",
        "unused_share",
    )

    def __init__(self) -> None:
        self.calls = 0
        self.allocations = 0
        self.allocated = 0
        self.frees = 0
        self.peak: int | None = None
        self.kept = 0
        self.time_ns = 0
        self.readings = 0
        self.reserved_peak = 0
        self.unused_share = 0.0
        """Sum over the readings of ``(reserved - allocated) / reserved``."""

    def reach(self, level: int) -> None:
        """Live bytes were at ``level`` while this was active."""
        if self.peak is None or level > self.peak:
            self.peak = level


class _Frame:
    """A module that is at work, or a stretch of work outside all modules."""

    __slots__ = ("began_ns", "held", "layer", "opening", "peak", "phase")

    def __init__(self, layer: int, phase: int, began_ns: int, live: int) -> None:
        self.layer = layer
        self.phase = phase
        self.began_ns = began_ns
        self.opening = live
        self.peak = live
        self.held: list[LiveStorage] = []

    def hold(self, held: LiveStorage) -> None:
        """Remembers what was allocated here, without what is gone again."""
        self.held.append(held)
        if len(self.held) >= PIECE:
            self.held = [held for held in self.held if held.alive]


class Accountant:
    """The books of one trace.

    Args:
        by_readings: Whether live bytes are those that READING events tell (a sampler records no
            allocations) rather than the sum of what was allocated and not freed.

    Attributes:
        live_bytes: Bytes live now, over those at the start.
        before_bytes: Bytes that were there before the trace.
        peak_bytes: The highest `live_bytes` so far.
        peak_ns: When that was.
        at_peak: What was live then.
        rows: Figures by layer and phase.
        lines: Bytes allocated outside all modules, by the number of the line.
        last_ns: The time of the last event.
        unmatched_frees: Frees of what nobody saw allocated.
    """

    def __init__(self, *, by_readings: bool = False) -> None:
        self.live_bytes = 0
        self.before_bytes = 0
        self.peak_bytes = 0
        self.peak_ns = 0
        self.at_peak: list[LiveStorage] = []
        self.rows: dict[tuple[int, int], Row] = {}
        self.lines: Counter[int] = Counter()
        self.last_ns = 0
        self.unmatched_frees = 0
        self._by_readings = by_readings
        self._opening_reading: int | None = None
        self._live: dict[int, LiveStorage] = {}
        self._frames: dict[int, list[_Frame]] = {}
        self._created: list[LiveStorage] = []
        self._index = 0
        self._peak_index = -1
        self._handlers = (
            self._alloc,
            self._free,
            self._enter,
            self._exit,
            self._turn,
            self._classify,
            self._reading,
            self._uses,
            self._line,
        )

    def fold(self, events: bytes) -> None:
        """Takes the next part of the stream."""
        step = PIECE * encoding.EVENT_BYTES
        for start in range(0, len(events), step):
            self._fold_piece(events[start : start + step])

    def finish(self) -> None:
        """Ends what is still at work; nothing may be folded afterwards."""
        for thread, frames in self._frames.items():
            while len(frames) > 1:
                self._close(thread, frames.pop(), self.last_ns)
            _settle(frames[0])

    def remaining(self) -> list[LiveStorage]:
        """What is live now."""
        return list(self._live.values())

    def _fold_piece(self, piece: bytes) -> None:
        opening = dict(self._live)
        self._created = []
        self._peak_index = -1
        handlers = self._handlers
        for self._index, event in enumerate(encoding.decode(piece)):
            handlers[event.kind](event)
            self.last_ns = event.time_ns
        seen = 0
        if self._peak_index >= 0:
            until_peak = piece[: (self._peak_index + 1) * encoding.EVENT_BYTES]
            self.at_peak, seen = self._replay(opening, until_peak)
        # These were there at the peak, too: they are only heard of later.
        self.at_peak += [held for held in self._created[seen:] if held.phase == BEFORE]

    def _replay(self, live: dict[int, LiveStorage], piece: bytes) -> tuple[list[LiveStorage], int]:
        """What is live after ``piece``, and how many allocations it has."""
        count = 0
        for event in encoding.decode(piece):
            if event.kind == encoding.ALLOC:
                live[event.key] = self._created[count]
                count += 1
            elif event.kind == encoding.FREE:
                live.pop(event.key, None)
        return list(live.values()), count

    def _row(self, layer: int, phase: int) -> Row:
        row = self.rows.get((layer, phase))
        if row is None:
            row = self.rows[layer, phase] = Row()
        return row

    def _alloc(self, event: StreamEvent) -> None:
        held = LiveStorage(event.size, event.layer, event.phase, event.category)
        self._live[event.key] = held
        self._created.append(held)
        if event.phase == BEFORE:
            self.before_bytes += event.size
            return
        row = self._row(event.layer, event.phase)
        row.allocations += 1
        row.allocated += event.size
        self.live_bytes += event.size
        self._risen(event.time_ns)
        row.reach(self.live_bytes)
        frames = self._frames.get(event.thread)
        if frames is None:
            frames = self._stack(event.thread)
        frames[-1].hold(held)

    def _stack(self, thread: int) -> list[_Frame]:
        """A thread's frames; the first stands for its work outside all modules, and is never closed."""
        frames = self._frames.get(thread)
        if frames is None:
            frames = self._frames[thread] = [_Frame(OUTSIDE, FORWARD, 0, self.live_bytes)]
        return frames

    def _risen(self, time_ns: int) -> None:
        live = self.live_bytes
        if live > self.peak_bytes:
            self.peak_bytes, self.peak_ns, self._peak_index = live, time_ns, self._index
        for frames in self._frames.values():
            frames[-1].peak = max(frames[-1].peak, live)

    def _free(self, event: StreamEvent) -> None:
        held = self._live.pop(event.key, None)
        if held is None:
            self.unmatched_frees += 1
            return
        held.alive = False
        self.live_bytes -= held.size
        if held.phase != BEFORE:
            self._row(held.layer, held.phase).frees += 1

    def _enter(self, event: StreamEvent) -> None:
        frame = _Frame(event.layer, event.phase, event.time_ns, self.live_bytes)
        self._stack(event.thread).append(frame)

    def _exit(self, event: StreamEvent) -> None:
        frames = self._stack(event.thread)
        if not any(frame.layer == event.layer for frame in frames[1:]):
            return  # it began before the trace did
        closed = OUTSIDE
        while closed != event.layer:
            closed = frames[-1].layer
            self._close(event.thread, frames.pop(), event.time_ns)

    def _turn(self, event: StreamEvent) -> None:
        frames = self._stack(event.thread)
        if frames[-1].phase in (BACKWARD, OPTIMIZER):
            self._close(event.thread, frames.pop(), event.time_ns)
        elif event.phase == BACKWARD:
            # What the loss left behind is needed by the backward pass that begins.
            _settle(frames[-1])
        if event.phase != FORWARD:
            frames.append(_Frame(event.layer, event.phase, event.time_ns, self.live_bytes))

    def _close(self, thread: int, frame: _Frame, time_ns: int) -> None:
        row = self._row(frame.layer, frame.phase)
        row.calls += 1
        row.time_ns += time_ns - frame.began_ns
        row.kept += self.live_bytes - frame.opening
        row.reach(frame.peak)
        if frame.phase == FORWARD:
            _settle(frame)
        outer = self._frames[thread][-1]
        outer.peak = max(outer.peak, frame.peak)

    def _classify(self, event: StreamEvent) -> None:
        held = self._live.get(event.key)
        if held is None:
            return
        held.category = event.category
        if event.layer != OUTSIDE:
            held.layer = event.layer

    def _uses(self, event: StreamEvent) -> None:
        """Nothing that the books hold."""

    def _line(self, event: StreamEvent) -> None:
        held = self._live.get(event.key)
        if held is not None:
            held.line = event.size
            self.lines[event.size] += held.size

    def _reading(self, event: StreamEvent) -> None:
        allocated, reserved = event.key, event.size
        row = self._row(event.layer, event.phase)
        if reserved > 0:
            row.readings += 1
            row.reserved_peak = max(row.reserved_peak, reserved)
            row.unused_share += (reserved - allocated) / reserved
        if not self._by_readings:
            return
        if self._opening_reading is None:
            self._opening_reading = self.before_bytes = allocated
        self.live_bytes = allocated - self._opening_reading
        self._risen(event.time_ns)


def _settle(frame: _Frame) -> None:
    """What a forward pass allocated and still holds at its exit are activations."""
    for held in frame.held:
        if held.alive and held.category == UNDECIDED:
            held.category = ACTIVATION
    frame.held = []

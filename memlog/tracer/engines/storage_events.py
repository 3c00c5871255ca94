"""Log of a trace's events, and the writer of storage events to the log.

Only estimates have it: on the CPU, libraries do not take such memory from torch's allocator.
"""

from __future__ import annotations

import threading
import time
import weakref
from collections.abc import Callable, Collection, Iterable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from typing import Any, NamedTuple

from memlog.trace import encoding
from memlog.trace.accounting import Accountant
from memlog.trace.encoding import ALLOC, CLASSIFY, FREE, LINE, TEMPORARY, UNDECIDED, pack
from memlog.trace.records import MOST_CASTS, UNKNOWN_TYPE, packed

_OF_STORAGES = (*(encoding.ALLOC, encoding.FREE, encoding.CLASSIFY, encoding.USES, encoding.LINE),)
_FOLD_AT_ONCE = 8192
"""Number of events that the log adds to the totals at once, after the log has kept ``max_events`` events."""


class EventLog:
    """Log that keeps the first events individually, and folds all events into totals.

    Folding adds events to the totals. The log then deletes the events that it does not keep.

    Args:
        max_events: Maximum number of events to keep individually.
        most_events: Number of folded events at which the log overflows; ``None``: no limit.
        most_seconds: Seconds of memlog's own code after which recording stops; ``None``: no limit.

    Attributes:
        append: Function that appends packed events in one atomic call, from any thread.
        events: Number of events that have been folded.
        overflowed: True as soon as ``most_events`` events have been folded.
        seconds: Seconds that memlog's own code has taken in the window.
        cut: True as soon as ``seconds`` has reached ``most_seconds``.
        on_overflow: Function without arguments that stops recording. It is called once if the log is cut, and
            at each fold while ``overflowed`` is true.
        elsewhere: Highest number of bytes of the storages that `leave_out` has removed.
        began_us: Start of the log, in microseconds since the epoch.
    """

    def __init__(
        self,
        max_events: int,
        accountant: Accountant,
        most_events: int | None = None,
        most_seconds: float | None = None,
    ) -> None:
        self.accountant = accountant
        self._most_events = most_events
        self._most_seconds = float("inf") if most_seconds is None else most_seconds
        self.seconds = 0.0
        self.cut = False
        self.events = 0
        self._max_kept = max_events
        self._kept: list[bytes] = []
        self._kept_events = 0
        self._appended = bytearray()
        self._limit = max_events * encoding.EVENT_BYTES
        self._folding = threading.Lock()
        self.begin()
        self.overflowed = False
        self.on_overflow: Callable[[], object] = int
        self.append = self._appended.extend
        self.elsewhere = 0

    def begin(self) -> None:
        """Set the start of the log to now. Times of events count from this start."""
        self.began_us = time.time_ns() // 1000
        # This clock never jumps, unlike the time of day.
        self._began_ns = time.perf_counter_ns()

    def now(self) -> int:
        """Return nanoseconds since the log began."""
        return time.perf_counter_ns() - self._began_ns

    def took(self, seconds: float) -> None:
        """Record that memlog's own code has taken ``seconds`` of the traced program's time."""
        self.seconds += seconds
        if self.seconds >= self._most_seconds and not self.cut:
            self.cut = True
            self.on_overflow()

    def fold_when_full(self) -> None:
        """Call `fold` if enough events have been appended. Finalizers must not call this."""
        if len(self._appended) >= self._limit:
            self.fold()

    def fold(self) -> None:
        """Fold the appended events into the totals. Do nothing if another thread is folding."""
        if not self._folding.acquire(blocking=False):
            return
        try:
            # Copying and deleting are each atomic. Events that finalizers append in between stay.
            piece = bytes(self._appended)
            del self._appended[: len(piece)]
            self.accountant.fold(piece)
            self._keep(piece)
            if self._kept_events >= self._max_kept:
                self._limit = _FOLD_AT_ONCE * encoding.EVENT_BYTES
        finally:
            self._folding.release()
        if self._most_events is not None and self.events >= self._most_events:
            self.overflowed = True
            self.on_overflow()

    def leave_out(self, keys: Collection[int]) -> None:
        """Remove the events of storages, given by their keys, from the events that are not folded yet."""
        kept, live, level = bytearray(), dict[int, int](), 0
        for event in encoding.decode(bytes(self._appended)):
            if event.kind not in _OF_STORAGES or event.key not in keys:
                kept += encoding.pack(*event)
            elif event.kind == encoding.ALLOC:
                live[event.key] = event.size
                level += event.size
                self.elsewhere = max(self.elsewhere, level)
            elif event.kind == encoding.FREE:
                level -= live.pop(event.key, 0)
        self._appended[:] = kept

    def close(self) -> tuple[bytes, int]:
        """Add the remaining events to the totals, and finish the totals.

        Returns:
            The kept events, and their number.
        """
        self.fold()
        self.accountant.finish()
        return b"".join(self._kept), self._kept_events

    def _keep(self, piece: bytes) -> None:
        count = len(piece) // encoding.EVENT_BYTES
        self.events += count
        fits = min(count, self._max_kept - self._kept_events)
        if fits > 0:
            self._kept.append(piece[: fits * encoding.EVENT_BYTES])
            self._kept_events += fits


class AllocationOwner(NamedTuple):
    """Layer, phase and thread number of new memory."""

    layer: int
    phase: int
    thread: int


class TrackedStorage(weakref.ref[Any]):
    """Weak reference to a live storage, with the data for the storage's FREE event.

    A moment is given as the serial number of the newest storage at that time. A product is a matrix product
    or a convolution.

    Attributes:
        type: Type under autocast, as in `memlog.trace.records`.
        cast_first: Moment at which a product first used the storage; 0: never.
        cast_last: Moment at which a product last used the storage; 0: never.
        casts: Number of products in the forward pass that used the storage.
        used: Moment at which an operation that is no product last used the storage; 0: never.
        backward_layer: Layer whose backward pass used the storage first.
        wide_inside: True if the storage belongs to an attention that computes in four bytes per number.
        outside: True if the storage was made outside all modules.
        is_gradient: True if a backward pass made the storage.
    """

    __slots__ = (
        "backward_layer",
        "cast_first",
        "cast_last",
        "casts",
        "category",
        "is_gradient",
        "outside",
        "pointer",
        "serial",
        "size",
        "type",
        "used",
        "wide_inside",
    )

    pointer: int
    serial: int
    size: int
    category: int
    type: int
    cast_first: int
    cast_last: int
    casts: int
    used: int
    backward_layer: int
    wide_inside: bool
    outside: bool
    is_gradient: bool

    def use_event(self, kind: int, now: int) -> bytes:
        """Return an event of ``kind`` (FREE or USES).

        The event contains the uses of the storage if they were analysed.
        """
        if self.type == UNKNOWN_TYPE:
            return pack(self.serial, 0, now, 0, kind, 0, 0, 0)
        return pack(
            self.serial,
            packed(self.cast_first, self.cast_last, self.used),
            now,
            self.backward_layer,
            kind,
            self.type,
            0,
            min(self.casts, MOST_CASTS),
        )


@dataclass
class _PendingAllocation:
    """New storage whose ALLOC event is not written yet.

    Attributes:
        instead: Older storage. If the next event frees the older storage, the new storage replaces it.
        workspace: Workspace events of the operation that allocated the new storage.
    """

    tracked: TrackedStorage
    instead: TrackedStorage
    event: bytes
    workspace: bytes = b""


class StorageEvents:
    """Writer of the events of storages.

    If a new storage may replace an older storage, the new storage's ALLOC event waits for the next event.

    Attributes:
        line: Number of the program's line to which new storages belong; 0: none, because a module makes them.
    """

    def __init__(self, log: EventLog) -> None:
        self._log = log
        self._pending: list[_PendingAllocation] = []
        self._held: tuple[list[tuple[int, bytes]], Callable[[], object]] | None = None
        self.line = 0

    def allocation(
        self, tracked: TrackedStorage, owner: AllocationOwner, instead: TrackedStorage | None
    ) -> None:
        """Write the ALLOC event of a storage.

        ``instead``: Older storage that the storage may replace. If given, the event waits for the next event.
        """
        self.write_pending()
        now, serial, category = self._log.now(), tracked.serial, tracked.category
        layer, phase, thread = owner
        event = pack(serial, tracked.size, now, layer, ALLOC, phase, category, thread)
        if category == UNDECIDED:
            event += self._made_by(serial, now)
        if instead is None:
            self._log.append(event)
        else:
            self._pending.append(_PendingAllocation(tracked, instead, event))

    def workspace(
        self, changes: Iterable[tuple[int, int]], owner: AllocationOwner, made: int
    ) -> None:
        """Write the ALLOC and FREE events of an operation's workspace.

        ``changes``: Serial number and bytes of each block that is allocated, and the serial number and 0 of
        each block that is freed.
        """
        now = self._log.now()
        layer, phase, thread = owner
        events = b""
        for serial, size in changes:
            if size:
                events += pack(serial, size, now, layer, ALLOC, phase, TEMPORARY, thread)
                events += self._made_by(serial, now)
            else:
                events += pack(serial, 0, now, 0, FREE, made, 0, 0)
        # The workspace's events must follow the pending ALLOC event.
        if self._pending:
            self._pending[-1].workspace = events
        else:
            self._log.append(events)

    def category(self, tracked: TrackedStorage, layer: int) -> None:
        self.write_pending()
        now = self._log.now()
        self._log.append(pack(tracked.serial, 0, now, layer, CLASSIFY, 0, tracked.category, 0))

    def use(self, tracked: TrackedStorage, kind: int) -> None:
        """Write how operations used a storage.

        ``kind``: ``FREE`` if the storage is freed, ``USES`` if the trace ends first.
        """
        self._log.append(tracked.use_event(kind, self._log.now()))

    def write_pending(self) -> None:
        """Write the pending ALLOC event, if there is one.

        Call this before every other event, except a storage's free and the events of a workspace.
        """
        if not self._pending:
            return  # an exception at every event would take longer than the event itself
        with suppress(IndexError):  # a finalizer may have taken it in between
            pending = self._pending.pop()
            self._log.append(pending.event + pending.workspace)

    @contextmanager
    def held(self, freed: Callable[[], object]) -> Iterator[list[tuple[int, bytes]]]:
        """Inside the block, write no FREE events. Yield the list of them, each with its storage's bytes.

        ``freed``: Function that is called at each of these frees.
        """
        self.write_pending()
        frees: list[tuple[int, bytes]] = []
        before, self._held = self._held, (frees, freed)
        try:
            yield frees
        finally:
            self._held = before

    def write(self, events: bytes) -> None:
        self._log.append(events)

    def _made_by(self, serial: int, now: int) -> bytes:
        return pack(serial, self.line, now, 0, LINE, 0, 0, 0) if self.line else b""

    def finalizer(self, storages: dict[int, TrackedStorage]) -> Callable[[TrackedStorage], None]:
        """Return the function that Python calls when a storage is freed.

        Python may call the function while memlog's code is running, so the function takes no lock.
        """
        append, now, pending = self._log.append, self._log.now, self._pending

        def storage_freed(tracked: TrackedStorage) -> None:
            if tracked.serial >= 0:
                if pending:
                    successor = pending.pop()
                    if successor.instead is tracked:
                        new = successor.tracked
                        new.serial, new.size = tracked.serial, tracked.size
                        storages.pop(tracked.pointer, None)
                        append(successor.workspace)
                        return
                    append(successor.event + successor.workspace)
                # A newer storage can have the same address.
                if storages.get(tracked.pointer) is tracked:
                    del storages[tracked.pointer]
                event = tracked.use_event(FREE, now())
                if self._held is None:
                    append(event)
                else:
                    frees, freed = self._held
                    freed()
                    frees.append((tracked.size, event))

        return storage_freed

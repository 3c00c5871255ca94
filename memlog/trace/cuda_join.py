"""Join of two records: the history of a device's allocator, and the marks that hooks record.

A mark is a change of layer or phase, or the category of a storage. At each change, a hook passes the mark's
number to the allocator as a note. The allocator attaches the note to every later event of the thread. So an
allocation's note gives the allocation's layer and phase. If an allocator takes no notes (XPU), memlog finds
marks by time, and can confuse marks within one microsecond.
"""

from __future__ import annotations

import re
from bisect import bisect_right
from collections.abc import Iterable, Iterator, Sequence
from typing import Any, NamedTuple

from memlog.trace.encoding import (
    ALLOC,
    BACKWARD,
    BEFORE,
    CLASSIFY,
    ENTER,
    FORWARD,
    FREE,
    OTHER,
    OUTSIDE,
    READING,
    UNDECIDED,
    pack,
)

_BLOCK = 512
"""CUDA's and XPU's allocators round sizes up to a multiple of this number of bytes (``kMinBlockSize``)."""

_NOTE = re.compile("ml([0-9a-f]+)")


class HookMark(NamedTuple):
    """A change of layer, phase or category that a hook recorded."""

    time_ns: int
    kind: int
    """ENTER, EXIT, PHASE_CHANGE, or CLASSIFY."""
    layer: int
    phase: int
    thread: int
    owner: tuple[int, int] = (OUTSIDE, FORWARD)
    """Layer and phase to which the thread's allocations after this mark belong."""
    address: int = 0
    """Address of the storage that a CLASSIFY mark classifies."""
    inputs: tuple[int, int] = (0, 0)
    """Addresses of a module's inputs. In the stream of events, the inputs' serials replace the addresses (see
    ENTER in `memlog.trace.encoding`)."""
    category: int = UNDECIDED
    reading: tuple[int, int] | None = None
    """Allocated bytes and reserved bytes of the allocator; ``None``: not read at this mark."""


class ExistingStorage(NamedTuple):
    """Storage whose layer and category are known. It was allocated before the trace or during the trace."""

    address: int
    size: int
    layer: int
    category: int


def label(number: int) -> str:
    """Return the note for a mark.

    The note is short, because C++ stores a text of up to 15 characters without an allocation.
    """
    return f"ml{number:x}"


def number_of(note: Any) -> int | None:
    """Return the number of the mark that a note names; ``None`` if memlog did not write the note."""
    found = _NOTE.fullmatch(note) if isinstance(note, str) else None
    return None if found is None else int(found[1], 16)


def rounded(size: int) -> int:
    return -(-size // _BLOCK) * _BLOCK


def _first_entries(history: Sequence[Any]) -> dict[int, Any]:
    """Return the first allocation or free at each address.

    If the first entry is a free, the storage was allocated before the history began.
    """
    first: dict[int, Any] = {}
    for entry in history:
        if entry.get("action") in ("alloc", "free_requested"):
            first.setdefault(entry["addr"], entry)
    return first


class HistoryJoin:
    """Builder of the stream of events from a device's history and the marks.

    Args:
        marks: Marks by number.
        existing: Storages whose layers and categories are known. A storage is ignored if the history contains
            the allocation of the storage.
        opening: Allocated bytes when the trace began; ``None``: unknown.
        started_us: Unix time in microseconds at which the trace began.
        by_time: True if the history holds no notes (see `label`). Marks are then found by time.

    Attributes:
        unattributed: Number of allocations that have a note of an earlier backward pass. The layer of these
            allocations is unknown.
    """

    def __init__(
        self,
        marks: Sequence[HookMark],
        existing: Iterable[ExistingStorage],
        *,
        opening: int | None,
        started_us: int,
        by_time: bool = False,
    ) -> None:
        self._marks = marks
        self._existing = list(existing)
        self._opening = opening
        self._started_us = started_us
        # A CLASSIFY mark changes no layer or phase. Allocations after it belong to the change before it.
        changes = (number for number, mark in enumerate(marks) if mark.kind != CLASSIFY)
        self._changes = list(changes) if by_time else None
        self._live: dict[int, int] = {}
        self._serial = 0
        self._now = 0
        self._next_mark = 0
        self._last_forward = -1
        self.unattributed = 0

    def events(self, history: Sequence[Any]) -> Iterator[bytes]:
        """Yield the encoded events.

        ``history`` holds the device's entries in a snapshot's ``device_traces``. Entries with an unknown
        action are skipped.
        """
        yield from self._before(history)
        for entry in history:
            action = entry.get("action")
            if action not in {"alloc", "free_requested"}:
                continue
            number = self._mark_number(entry)
            yield from self._marks_until(-1 if number is None else number)
            if action == "alloc":
                yield self._alloc(entry, number)
            else:
                yield from self._free(entry)
        yield from self._marks_until(len(self._marks) - 1)

    def _before(self, history: Sequence[Any]) -> Iterator[bytes]:
        """Yield an ALLOC for each known storage older than the trace. Yield one ALLOC for all other bytes.

        A storage is known if it is in ``existing``, or if the history has its free but not its allocation.
        """
        known = 0
        first = _first_entries(history)
        allocated = {address for address, entry in first.items() if entry["action"] == "alloc"}
        for storage in self._existing:
            if storage.address not in self._live and storage.address not in allocated:
                size = rounded(storage.size)
                yield self._add(storage.address, size, storage.layer, BEFORE, storage.category)
                known += size
        for address, entry in first.items():
            if address not in allocated and address not in self._live:
                size = rounded(entry["size"])
                yield self._add(address, size, OUTSIDE, BEFORE, OTHER)
                known += size
        if self._opening is not None and self._opening > known:
            yield self._add(-1, self._opening - known, OUTSIDE, BEFORE, OTHER)

    def _mark_number(self, entry: Any) -> int | None:
        """Return the number of the last change of layer or phase before an entry; ``None`` if unknown."""
        if self._changes is not None:
            time_ns = self._time_of(entry)
            before = bisect_right(self._changes, time_ns, key=lambda n: self._marks[n].time_ns)
            return self._changes[before - 1] if before else None
        noted = number_of(entry.get("user_metadata"))
        return noted if noted is not None and noted < len(self._marks) else None

    def _marks_until(self, last: int) -> Iterator[bytes]:
        """Yield the events of all marks up to number ``last`` that are not yet in the stream."""
        while self._next_mark <= last:
            mark = self._marks[self._next_mark]
            if mark.kind == ENTER and mark.phase == FORWARD and mark.thread == 0:
                self._last_forward = self._next_mark
            self._next_mark += 1
            self._now = max(self._now, mark.time_ns)
            yield from self._mark(mark)

    def _mark(self, mark: HookMark) -> Iterator[bytes]:
        if mark.kind == CLASSIFY:
            serial = self._live.get(mark.address)
            if serial is not None:
                yield pack(
                    serial, 0, self._now, mark.layer, CLASSIFY, 0, mark.category, mark.thread
                )
            return
        if mark.reading is not None:
            allocated, reserved = mark.reading
            yield pack(
                allocated, reserved, self._now, mark.layer, READING, mark.phase, 0, mark.thread
            )
        key, size = (self._live.get(one, 0) if one > 0 else one for one in mark.inputs)
        yield pack(key, size, self._now, mark.layer, mark.kind, mark.phase, 0, mark.thread)

    def _alloc(self, entry: Any, number: int | None) -> bytes:
        self._now = max(self._now, self._time_of(entry))
        thread, (layer, phase) = 0, (OUTSIDE, FORWARD)
        if number is not None:
            mark = self._marks[number]
            thread, (layer, phase) = mark.thread, mark.owner
            if phase == BACKWARD and thread != 0 and number < self._last_forward:
                # This mark of an autograd thread is from an earlier backward pass. The layer is unknown.
                layer = OUTSIDE
                self.unattributed += 1
        return self._add(
            entry["addr"], rounded(entry["size"]), layer, phase, UNDECIDED, thread=thread
        )

    def _free(self, entry: Any) -> Iterator[bytes]:
        self._now = max(self._now, self._time_of(entry))
        serial = self._live.pop(entry["addr"], None)
        if serial is not None:
            yield pack(serial, 0, self._now, 0, FREE, 0, 0, 0)

    def _add(
        self, address: int, size: int, layer: int, phase: int, category: int, *, thread: int = 0
    ) -> bytes:
        self._serial += 1
        self._live[address] = self._serial
        return pack(self._serial, size, self._now, layer, ALLOC, phase, category, thread)

    def _time_of(self, entry: Any) -> int:
        time_ns: int = (entry.get("time_us", 0) - self._started_us) * 1000
        return time_ns

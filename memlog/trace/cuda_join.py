"""Join of the history of a device's allocator with the marks that hooks record, and the allocator's blocks.

An allocation of more than 1 MiB gets a free block that is large enough. If at most 1 MiB would remain, the
allocator does not split the block (``should_split`` in torch's CUDACachingAllocator.cpp), and the whole block
counts as allocated. The history has the requested size only. But the free block was as long as the distance
to the next block in use, or to the segment's end, because the allocator joins free neighbours. In expandable
segments, blocks are always split.

The ratio is ``(reserved - allocated) / reserved``. Free blocks in private pools do not count.

A mark is a change of layer or phase, or the category of a storage. At each change, a hook passes the mark's
number to the allocator as a note. The allocator attaches the note to every later event of the thread. So an
allocation's note gives the allocation's layer and phase. If an allocator takes no notes (XPU), memlog finds
marks by time, and can confuse marks within one microsecond.
"""

from __future__ import annotations

import re
from bisect import bisect_left, bisect_right
from collections import Counter
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

from memlog.trace.encoding import (
    ALLOC,
    BACKWARD,
    BEFORE,
    CLASSIFY,
    COMMUNICATION,
    ENTER,
    EXIT,
    FORWARD,
    FREE,
    OTHER,
    OUTSIDE,
    PRIVATE_POOL,
    READING,
    UNDECIDED,
    WORKSPACE,
    pack,
)
from memlog.trace.records import Fragmentation


class LiveBlock(NamedTuple):
    """A block in use: its bytes, the bytes requested for it, and True if the block is in a private pool."""

    size: int
    requested: int
    private: bool


def live_blocks(snapshot: Any, device: int) -> dict[int, LiveBlock]:
    """Return the blocks in use of one device, by address. ``device``: Index of the device."""
    return {
        address: LiveBlock(
            block["size"],
            block.get("requested_size", block["size"]),
            in_private_pool(segment.get("segment_pool_id")),
        )
        for segment in snapshot.get("segments", ())
        if segment.get("device", 0) == device
        for address, block in _with_addresses(segment)
        if block["state"] == "active_allocated"
    }


def in_private_pool(pool: Any) -> bool:
    """Return whether a pool's number in torch's snapshot is that of a private pool.

    A captured CUDA graph has a private pool, and so has a ``torch.cuda.MemPool``. All other memory is in the
    pool with the number (0, 0).
    """
    return any(pool or ())


def _with_addresses(segment: Any) -> list[tuple[int, Any]]:
    """Return a segment's blocks with their addresses, which snapshots of older torch lack."""
    blocks, address = [], segment.get("address", 0)
    for block in segment["blocks"]:
        blocks.append((block.get("address", address), block))
        address += block["size"]
    return blocks


_SMALL = 1 << 20
"""Largest size of an allocation in the pool of small blocks, and largest remainder that is not split off
(``kSmallSize``)."""
_EFFECTS = {"alloc": 1, "free_requested": -1, "segment_alloc": 1, "segment_free": -1}
"""Actions of the history: 1 if they add a block in use or a segment, -1 if they remove it."""
_IN_USE = ("active_allocated", "active_pending_free")


class UnsplitBytes(NamedTuple):
    """Bytes by which blocks are longer than their rounded requested sizes. Blocks without such bytes lack."""

    older: dict[int, int]
    """By address, for blocks from before the history that it frees."""
    made: dict[int, int]
    """By the index of the allocation in the history."""


def unsplit_bytes(history: Sequence[Any], snapshot: Any, device: int) -> UnsplitBytes:
    """Return the ends of unsplit blocks.

    Args:
        history: One device's entries of the snapshot's ``device_traces``, or the last of them.
        snapshot: torch's snapshot at the end of the history.
        device: Index of the device.
    """
    changes = [
        (index, entry["action"], entry["addr"], entry["size"])
        for index, entry in enumerate(history)
        if entry.get("action") in _EFFECTS and entry["size"] > _SMALL
    ]
    # The snapshot is of the history's end. Undoing the changes, the newest first, gives the layout
    # at its beginning.
    layout = _Layout(snapshot, device)
    for _, action, address, size in reversed(changes):
        layout.change(action, address, size, -_EFFECTS[action])
    older: dict[int, int] = {}
    made: dict[int, int] = {}
    seen = set[int]()
    for index, action, address, size in changes:
        # If no earlier change names the address, the block is older than the history.
        if action == "free_requested" and address not in seen:
            older[address] = layout.end_of_block(address, size)
        elif action == "alloc":
            made[index] = layout.end_of_block(address, size)
        if not action.startswith("segment"):
            seen.add(address)
        layout.change(action, address, size, _EFFECTS[action])
    return UnsplitBytes(_positive(older), _positive(made))


def _positive(sizes: dict[int, int]) -> dict[int, int]:
    return {key: size for key, size in sizes.items() if size > 0}


class _Layout:
    """Segments and blocks in use of the allocator's pools of large blocks, except expandable segments."""

    def __init__(self, snapshot: Any, device: int) -> None:
        settings = snapshot.get("allocator_settings") or {}
        self._max_split = settings.get("max_split_size") or 0
        self._segments: dict[int, int] = {}
        self._blocks: list[int] = []
        for segment in snapshot.get("segments", ()):
            large = segment.get("segment_type") == "large" and not segment.get("is_expandable")
            if large and segment.get("device", 0) == device:
                self._segments[segment["address"]] = segment["total_size"]
                self._add_blocks(segment)
        self._blocks.sort()
        self._starts = sorted(self._segments)

    def _add_blocks(self, segment: Any) -> None:
        address = segment["address"]
        for block in segment["blocks"]:
            if block["state"] in _IN_USE:
                self._blocks.append(address)
            address += block["size"]

    def change(self, action: str, address: int, size: int, effect: int) -> None:
        """Add a block in use or a segment if ``effect`` is above 0, else remove it."""
        of_segment = action.startswith("segment")
        places = self._starts if of_segment else self._blocks
        at = bisect_left(places, address)
        known = at < len(places) and places[at] == address
        if effect < 0 and known:
            del places[at]
        elif effect > 0 and not known:
            places.insert(at, address)
        if of_segment:
            self._segments[address] = size

    def end_of_block(self, address: int, requested: int) -> int:
        """Return the bytes of a large block beyond its rounded requested size; 0 if it was split."""
        at = bisect_right(self._starts, address) - 1
        if at < 0:
            return 0
        end = self._starts[at] + self._segments[self._starts[at]]
        following = bisect_right(self._blocks, address)
        if following < len(self._blocks):
            end = min(end, self._blocks[following])
        rest = end - address - -(-requested // 512) * 512
        # From this size on, the allocator never splits a block, whatever remains.
        oversize = 0 < self._max_split <= requested
        return rest if oversize or rest <= _SMALL else 0


def of_statistics(allocated: int, reserved: int | None) -> Fragmentation | None:
    """Compute fragmentation from an allocator's totals, in bytes; ``None`` if nothing is reserved."""
    if not reserved:
        return None
    ratio = max(0.0, (reserved - allocated) / reserved)
    return Fragmentation(reserved, allocated, None, ratio, "statistics")


def of_segments(segments: Iterable[Any], device: int) -> Fragmentation | None:
    """Compute fragmentation from a snapshot's segments; ``None`` if the device has no segments.

    The result's ``inactive_split`` counts the free blocks of segments that are partly in use. No other pool
    of the allocator and no other process can use these blocks.
    """
    reserved = allocated = inactive = in_pools = 0
    for segment in segments:
        if segment.get("device", 0) != device:
            continue
        reserved += segment["total_size"]
        free = sum(block["size"] for block in segment["blocks"] if block["state"] == "inactive")
        allocated += sum(
            block["size"] for block in segment["blocks"] if block["state"] == "active_allocated"
        )
        if in_private_pool(segment.get("segment_pool_id")):
            in_pools += free
        elif free < segment["total_size"]:
            inactive += free
    if not reserved:
        return None
    ratio = (reserved - allocated - in_pools) / reserved
    return Fragmentation(reserved, allocated, inactive, ratio, "blocks", in_pools)


_BLOCK = 512
"""CUDA's and XPU's allocators round sizes up to a multiple of this number of bytes (``kMinBlockSize``)."""

_NO_ADDRESS = -1
"""Address of bytes that no event names one by one."""

_ALL_SPLIT = UnsplitBytes({}, {})
_OTHER_THREAD = 255
"""Number of a thread that has made no mark in the trace."""
NO_EVENT = -1
"""Kind of a mark that changes only the owner of its thread's later allocations."""

_NOTE = re.compile("ml([0-9a-f]+)")


class HookMark(NamedTuple):
    """A change of layer, phase or category that a hook recorded."""

    time_ns: int
    kind: int
    """ENTER, EXIT, PHASE_CHANGE, CLASSIFY, or `NO_EVENT`."""
    layer: int
    phase: int
    thread: int
    owner: tuple[int, int] = (OUTSIDE, FORWARD)
    """Layer and phase to which the thread's allocations after this mark belong."""
    address: int = 0
    """Address of the storage that a CLASSIFY mark classifies."""
    size: int = 0
    """Bytes of this storage."""
    inputs: tuple[int, int] = (0, 0)
    """Addresses of a module's inputs. In the stream of events, the inputs' serials replace the addresses (see
    ENTER in `memlog.trace.encoding`)."""
    category: int = UNDECIDED
    """Category that a CLASSIFY mark gives to its storage, a `NO_EVENT` mark to the thread's allocations."""
    reading: tuple[int, int] | None = None
    """Allocated bytes and reserved bytes of the allocator; ``None``: not read at this mark."""


class ExistingStorage(NamedTuple):
    """Storage whose layer and category were known when the trace began, or became known without a mark."""

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
    match = _NOTE.fullmatch(note) if isinstance(note, str) else None
    return None if match is None else int(match[1], 16)


def rounded(size: int) -> int:
    return -(-size // _BLOCK) * _BLOCK


def _end_of(address: int) -> int:
    """Return a number that stands for the unsplit end of the block at an address."""
    return -address


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
        marks: Marks in the order of their numbers.
        first_number: Number of the first mark. A thread's note can be from an earlier trace, so numbers are
            never used twice in a process.
        existing: Storages whose layers and categories are known. A storage is ignored if the history contains
            the allocation of the storage, or if ``blocks`` has no block for it (memory of another allocator).
        blocks: Blocks in use when the trace ended, by address; empty if unknown.
        workspaces: Addresses of the workspaces in use when the trace ended.
        buckets: Bytes of buffers for communication that may exist. An older block of such a size is one of
            them, if its tensor is unknown.
        unsplit: Bytes that blocks have beyond their requested sizes. They belong to no layer.
        opening: Allocated bytes when the trace began; ``None``: unknown.
        started_us: Unix time in microseconds at which the trace began.
        by_time: True if the history holds no notes (see `label`). Marks are then found by time.
    """

    def __init__(
        self,
        marks: Sequence[HookMark],
        existing: Iterable[ExistingStorage],
        *,
        first_number: int = 0,
        blocks: Mapping[int, LiveBlock] | None = None,
        workspaces: Collection[int] = (),
        buckets: Iterable[int] = (),
        unsplit: UnsplitBytes = _ALL_SPLIT,
        opening: int | None,
        started_us: int,
        by_time: bool = False,
    ) -> None:
        self._marks = marks
        self._first_number = first_number
        self._existing = list(existing)
        self._blocks = blocks or {}
        self._workspaces = workspaces
        self._buckets = Counter(map(rounded, buckets))
        self._unsplit = unsplit
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
        self._running = 0

    def events(self, history: Sequence[Any]) -> Iterator[bytes]:
        """Yield the encoded events.

        ``history`` holds the device's entries in a snapshot's ``device_traces``. Entries with an unknown
        action are skipped.
        """
        yield from self._before(_first_entries(history))
        made_here = self._workspaces_made_in(history)
        for index, entry in enumerate(history):
            action = entry.get("action")
            if action not in {"alloc", "free_requested"}:
                continue
            number = self._mark_number(entry)
            yield from self._marks_until(-1 if number is None else number)
            if action == "alloc":
                yield self._alloc(entry, number, is_workspace=made_here.get(entry["addr"]) == index)
                if index in self._unsplit.made:
                    end = self._unsplit.made[index]
                    yield self._add(_end_of(entry["addr"]), end, OUTSIDE, FORWARD, OTHER)
            else:
                yield from self._free(entry)
        yield from self._marks_until(len(self._marks) - 1)

    def _before(self, first: Mapping[int, Any]) -> Iterator[bytes]:
        """Yield an ALLOC for each storage older than the trace that is classified or freed in the trace.

        Yield an ALLOC for each buffer for communication that is found by its size, one for all other bytes of
        private pools, and one for all remaining bytes.

        ``first``: The first entry of the history at each address.
        """
        known = pools = 0
        for storage in self._older(first):
            yield self._add(storage.address, storage.size, storage.layer, BEFORE, storage.category)
            known += storage.size
        for address, size in self._unsplit.older.items():
            if address in self._live:
                yield self._add(_end_of(address), size, OUTSIDE, BEFORE, OTHER)
                known += size
        for address, block in self._blocks.items():
            if address in first or address in self._live:
                continue
            if block.private:
                pools += block.size
            elif self._is_bucket(size := rounded(block.requested)):
                yield self._add(address, size, OUTSIDE, BEFORE, COMMUNICATION)
                known += size
        if pools:
            yield self._add(_NO_ADDRESS, pools, OUTSIDE, BEFORE, PRIVATE_POOL)
        others = (self._opening or 0) - known - pools
        if others > 0:
            yield self._add(_NO_ADDRESS, others, OUTSIDE, BEFORE, OTHER)

    def _older(self, first: Mapping[int, Any]) -> list[ExistingStorage]:
        """Return the storages that are older than the trace and are classified or freed in the trace.

        A mark names a storage that is live at that moment. So the storage is older than the trace, unless
        the first entry at its address is an allocation. If the address was used again before the mark, the
        mark finds the newer storage, and the older one stays in the category that it gets here.
        """
        older: dict[int, ExistingStorage] = {}
        marked = dict.fromkeys(
            (mark.address, mark.size) for mark in self._marks if mark.kind == CLASSIFY
        )
        later = (ExistingStorage(*storage, OUTSIDE, OTHER) for storage in marked)
        for storage in (*self._existing, *later):
            entry, block = first.get(storage.address), self._blocks.get(storage.address)
            if storage.address in older or (entry is not None and entry["action"] == "alloc"):
                continue
            if entry is not None:
                size = rounded(entry["size"])
            elif block is None and self._blocks:
                size = 0
            else:
                # Not the block's size: a parameter and its gradient have equal sizes, their blocks may not.
                size = rounded(storage.size) or (block.size if block is not None else 0)
            if size:
                older[storage.address] = self._in_pool(storage._replace(size=size), entry)
        for address, entry in first.items():
            if entry["action"] != "alloc" and address not in older:
                size = rounded(entry["size"])
                category = COMMUNICATION if self._is_bucket(size) else OTHER
                freed = ExistingStorage(address, size, OUTSIDE, category)
                older[address] = self._in_pool(freed, entry)
        return list(older.values())

    def _is_bucket(self, size: int) -> bool:
        """Return whether an unknown storage is a buffer for communication. Each buffer is found once."""
        self._buckets[size] -= 1
        return self._buckets[size] >= 0

    def _in_pool(self, storage: ExistingStorage, entry: Any) -> ExistingStorage:
        """Put a storage of unknown category into the category of private pools if it is in such a pool."""
        block = self._blocks.get(storage.address)
        pool = entry.get("pool_id") if entry is not None else None
        private = in_private_pool(pool) or (entry is None and block is not None and block.private)
        return (
            storage._replace(category=PRIVATE_POOL)
            if private and storage.category == OTHER
            else storage
        )

    def _workspaces_made_in(self, history: Sequence[Any]) -> dict[int, int]:
        """Return the index of the allocation of each workspace that was made in the trace, by address."""
        return {
            entry["addr"]: index
            for index, entry in enumerate(history)
            if entry.get("action") == "alloc" and entry["addr"] in self._workspaces
        }

    def _mark_number(self, entry: Any) -> int | None:
        """Return the number of the last change of layer or phase before an entry; ``None`` if unknown."""
        if self._changes is not None:
            time_ns = self._time_of(entry)
            before = bisect_right(self._changes, time_ns, key=lambda n: self._marks[n].time_ns)
            return self._changes[before - 1] if before else None
        noted = number_of(entry.get("user_metadata"))
        if noted is None or not 0 <= noted - self._first_number < len(self._marks):
            return None
        return noted - self._first_number

    def _marks_until(self, last: int) -> Iterator[bytes]:
        """Yield the events of all marks up to number ``last`` that are not yet in the stream."""
        while self._next_mark <= last:
            mark = self._marks[self._next_mark]
            if mark.thread == 0:
                self._running += (mark.kind == ENTER) - (mark.kind == EXIT)
                if mark.kind == ENTER and mark.phase == FORWARD:
                    self._last_forward = self._next_mark
            self._next_mark += 1
            # Times never decrease, though marks and history are read from two clocks.
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
        if mark.kind == NO_EVENT:
            return
        if mark.reading is not None:
            allocated, reserved = mark.reading
            yield pack(
                allocated, reserved, self._now, mark.layer, READING, mark.phase, 0, mark.thread
            )
        key, size = (
            self._live.get(address, 0) if address > 0 else address for address in mark.inputs
        )
        yield pack(key, size, self._now, mark.layer, mark.kind, mark.phase, 0, mark.thread)

    def _alloc(self, entry: Any, number: int | None, *, is_workspace: bool) -> bytes:
        self._now = max(self._now, self._time_of(entry))
        thread, (layer, phase), category = 0, (OUTSIDE, FORWARD), UNDECIDED
        if number is None:
            thread, phase = self._owner_without_mark()
        else:
            mark = self._marks[number]
            thread, (layer, phase) = mark.thread, mark.owner
            category = mark.category if mark.kind == NO_EVENT else UNDECIDED
            if phase == BACKWARD and thread != 0 and number < self._last_forward:
                # This mark of an autograd thread is from an earlier backward pass. Now the thread computes
                # the gradients of the loss, before it reaches a module.
                layer = OUTSIDE
        if is_workspace:
            layer, category = OUTSIDE, WORKSPACE
        size = rounded(entry["size"])
        return self._add(entry["addr"], size, layer, phase, category, thread=thread)

    def _owner_without_mark(self) -> tuple[int, int]:
        """Return the thread and the phase of an allocation whose thread has made no mark in the trace.

        The thread that began the trace makes a mark at once. So the other thread is one of autograd's, which
        computes the gradients of the loss before it reaches a module, unless a module is running.
        """
        if self._changes is not None or not self._marks:
            return 0, FORWARD
        return _OTHER_THREAD, FORWARD if self._running else BACKWARD

    def _free(self, entry: Any) -> Iterator[bytes]:
        self._now = max(self._now, self._time_of(entry))
        for address in (entry["addr"], _end_of(entry["addr"])):
            serial = self._live.pop(address, None)
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

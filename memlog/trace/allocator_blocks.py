"""Blocks of a caching allocator: those in use, those that it could not split, and its fragmentation.

An allocation of more than 1 MiB gets a free block that is large enough. If at most 1 MiB would remain, the
allocator does not split the block (``should_split`` in torch's CUDACachingAllocator.cpp), and the whole block
counts as allocated. The history has the requested size only. But the free block was as long as the distance
to the next block in use, or to the segment's end, because the allocator joins free neighbours. In expandable
segments, blocks are always split.

The ratio is ``(reserved - allocated) / reserved``. Free blocks in private pools do not count.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple

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
    found, address = [], segment.get("address", 0)
    for block in segment["blocks"]:
        found.append((block.get("address", address), block))
        address += block["size"]
    return found


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
    layout = _Layout(snapshot, device)
    for _, action, address, size in reversed(changes):
        layout.change(action, address, size, -_EFFECTS[action])
    older: dict[int, int] = {}
    made: dict[int, int] = {}
    seen = set[int]()
    for index, action, address, size in changes:
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

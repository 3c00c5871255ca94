"""Ends of blocks that a caching allocator could not split, found from its history.

An allocation of more than 1 MiB gets a free block that is large enough. If at most 1 MiB would remain, the
allocator does not split the block (``should_split`` in torch's CUDACachingAllocator.cpp), and the whole block
counts as allocated. The history has the requested size only. But the free block was as long as the distance
to the next block in use, or to the segment's end, because the allocator joins free neighbours. In expandable
segments, blocks are always split.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Sequence
from typing import Any, NamedTuple

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

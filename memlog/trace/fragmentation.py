"""Fragmentation of a caching allocator: bytes that the allocator reserves but no tensor uses.

The ratio is ``(reserved - allocated) / reserved``. Free blocks in private pools do not count.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from memlog.trace.allocator_blocks import in_private_pool
from memlog.trace.records import Fragmentation


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

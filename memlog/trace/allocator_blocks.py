"""Blocks of a caching allocator that were in use when a snapshot was taken."""

from __future__ import annotations

from typing import Any, NamedTuple


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

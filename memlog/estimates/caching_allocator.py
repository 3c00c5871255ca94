"""Model of CUDA's caching allocator. It computes the bytes that the allocator reserves for allocations.

The rules are those of torch's ``c10/cuda/CUDACachingAllocator.cpp`` and ``c10/core/AllocatorConfig.h`` (torch
2.13) with their default settings. Each stream has pools of its own. docs/project/accuracy.md describes how
the model was checked.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from collections.abc import Iterator
from typing import Final

ROUNDING: Final = 512
"""Unit of block sizes, in bytes. Each block's size is a multiple of this unit (``kMinBlockSize``)."""
SMALL_BLOCK: Final = 1024**2
"""Maximum size in bytes of a block in the small pool (``kSmallSize``). The large pool has larger blocks."""
_SMALL_SEGMENT: Final = 2 * 1024**2
_LARGE_SEGMENT: Final = 20 * 1024**2
_OWN_SEGMENT: Final = 10 * 1024**2
"""Size limit, in bytes. For a block of at least this size, a new segment has the block's size, rounded up
(``kMinLargeAlloc``). For a smaller block, a new segment has a fixed size."""
_SEGMENT_ROUNDING: Final = 2 * 1024**2
_ADDRESS_SPACE: Final = _LARGE_SEGMENT << 36
"""Bytes of address space of an expandable segment: a multiple of each page size that no training exhausts."""


class OutOfMemoryError(Exception):
    """Error: the limit is too small for an allocation, even after unused segments are released."""


class _Block:
    """Part of a segment. ``before`` and ``after`` are its neighbours in the segment.

    ``mapped`` is False for address space of an expandable segment that has no memory.
    """

    __slots__ = ("address", "after", "before", "free", "mapped", "pool", "size")

    def __init__(self, address: int, size: int, pool: _Pool, *, mapped: bool = True) -> None:
        self.address = address
        self.size = size
        self.pool = pool
        self.free = True
        self.mapped = mapped
        self.before: _Block | None = None
        self.after: _Block | None = None

    def cut(self, size: int) -> _Block:
        """Keep the first ``size`` bytes in this block, and return a new block with the other bytes."""
        rest = _Block(self.address + size, self.size - size, self.pool, mapped=self.mapped)
        rest.before, rest.after = self, self.after
        if self.after is not None:
            self.after.before = rest
        self.after = rest
        self.size = size
        return rest

    @property
    def expandable_size(self) -> int:
        """Bytes of this free block and of the address space without memory behind it."""
        after = self.after
        return self.size if after is None or after.mapped else self.size + after.size


class _Pool:
    """Free blocks, in the order in which the allocator searches them: by size, then by address.

    Args:
        segment: Bytes of a new segment, and of each page by which an expandable segment grows.
        smallest_rest: Minimum number of bytes that remain free if a block is split. If fewer bytes would
            remain, the whole block is used.

    Attributes:
        unmapped: Address space without memory, by address. Only expandable segments have it.
    """

    def __init__(self, segment: int, smallest_rest: int) -> None:
        self.segment = segment
        self.smallest_rest = smallest_rest
        self.unmapped: list[tuple[int, _Block]] = []
        self._free: list[tuple[int, int, _Block]] = []

    def add(self, block: _Block) -> None:
        if block.mapped:
            insort(self._free, (block.size, block.address, block))
        else:
            insort(self.unmapped, (block.address, block))

    def remove(self, block: _Block) -> None:
        if block.mapped:
            del self._free[bisect_left(self._free, (block.size, block.address))]
        else:
            del self.unmapped[bisect_left(self.unmapped, (block.address,))]

    def take(self, size: int) -> _Block | None:
        """Remove and return the smallest free block of at least ``size`` bytes; ``None`` if there is none.

        A block that can grow counts with the size to which it can grow, so that the end of an expandable
        segment is used last.
        """
        # No address is below 0, so this finds the first block of at least this size.
        at = bisect_left(self._free, (size, 0))
        if at == len(self._free):
            return None
        while (
            at + 1 < len(self._free)
            and self._free[at + 1][2].expandable_size < self._free[at][2].expandable_size
        ):
            at += 1
        return self._free.pop(at)[2]

    def free_blocks(self) -> list[_Block]:
        return [block for _size, _address, block in self._free]


class CachingAllocator:
    """Allocator that keeps freed blocks, and uses them for later allocations.

    Args:
        limit: Bytes that the device has for the allocator; ``None``: no limit.
        allowed: Bytes that ``torch.cuda.set_per_process_memory_fraction`` allows; ``None``: no limit. The
            allocator checks them before it rounds a request up to pages of an expandable segment, so it may
            reserve more.
        expandable: True if segments grow, as with ``expandable_segments:True``.

    Attributes:
        reserved: Bytes that the allocator holds, in use or free.
        most_reserved: Highest ``reserved`` so far.
        allocated: Bytes in blocks that are in use.
        most_allocated: Highest ``allocated`` so far.
    """

    def __init__(
        self, limit: int | None = None, *, allowed: int | None = None, expandable: bool = False
    ) -> None:
        self.reserved = self.most_reserved = 0
        self.allocated = self.most_allocated = 0
        self._limit = limit
        self._allowed = allowed
        self._expandable = expandable
        self._pools: dict[int, tuple[_Pool, _Pool]] = {}
        """Pools for small and for large blocks, by the number of the stream."""
        self._next_address = 0
        self._used: dict[int, _Block] = {}

    def allocate(self, key: int, size: int, stream: int = 0) -> None:
        """Allocate ``size`` bytes for a stream. `free` frees them by ``key``.

        Raises:
            OutOfMemoryError: The bytes do not fit below the limit.
        """
        size = _up(max(size, 1), ROUNDING)
        small, large = self._pools_of(stream)
        pool = small if size <= SMALL_BLOCK else large
        block = pool.take(size) or self._new_block(pool, size)
        if block.size - size >= pool.smallest_rest:
            pool.add(block.cut(size))
        block.free = False
        self._used[key] = block
        self.allocated += block.size
        self.most_allocated = max(self.most_allocated, self.allocated)

    def _pools_of(self, stream: int) -> tuple[_Pool, _Pool]:
        if stream not in self._pools:
            # torch splits a block of the large pool only if more than `SMALL_BLOCK` bytes remain, except in
            # expandable segments.
            smallest_rest = ROUNDING if self._expandable else SMALL_BLOCK + 1
            large = _Pool(_LARGE_SEGMENT, smallest_rest)
            self._pools[stream] = _Pool(_SMALL_SEGMENT, ROUNDING), large
        return self._pools[stream]

    def free(self, key: int) -> None:
        block = self._used.pop(key)
        block.free = True
        self.allocated -= block.size
        block.pool.add(_joined(block))

    def _new_block(self, pool: _Pool, size: int) -> _Block:
        """Return a free block of at least ``size`` bytes of memory that the allocator did not hold before."""
        segment = _segment_size(pool, size)
        grow = self._grow if self._expandable else self._new_segment
        if self._is_allowed(segment) and (block := grow(pool, size, segment)) is not None:
            return block
        # As torch: it gives back unused segments only if the first attempt fails, and tries once more.
        self._release()
        if self._is_allowed(segment) and (block := grow(pool, size, segment)) is not None:
            return block
        raise OutOfMemoryError

    def _is_allowed(self, segment: int) -> bool:
        return self._allowed is None or self.reserved + segment <= self._allowed

    def _reserve(self, size: int) -> bool:
        """Take ``size`` bytes of the device; return False if it has not so many."""
        if self._limit is not None and self.reserved + size > self._limit:
            return False
        self.reserved += size
        self.most_reserved = max(self.most_reserved, self.reserved)
        return True

    def _new_segment(self, pool: _Pool, _size: int, segment: int) -> _Block | None:
        if not self._reserve(segment):
            return None
        return _Block(self._new_address(segment), segment, pool)

    def _new_address(self, size: int) -> int:
        address = self._next_address
        self._next_address += size + _LARGE_SEGMENT
        return address

    def _grow(self, pool: _Pool, size: int, _segment: int) -> _Block | None:
        """Map memory into an expandable segment, at the first place with enough free address space.

        ``None`` if the device has too little memory. Pages that were mapped before it ran out stay mapped.
        """
        block = self._place(pool, size)
        while not block.mapped or block.size < size:
            lacking = size - block.size if block.mapped else size
            unmapped = block.after if block.mapped else block
            assert unmapped is not None  # noqa: S101 - `_place` has looked for enough address space
            mapped = self._map(unmapped, min(lacking, unmapped.size))
            if mapped is None:
                return None
            block = mapped
        pool.remove(block)
        return block

    def _place(self, pool: _Pool, size: int) -> _Block:
        """Return the first of adjacent blocks, not in use, that can have ``size`` bytes together."""
        for _address, unmapped in pool.unmapped:
            before = unmapped.before
            # Free memory before this space counts, too, because the block grows from there.
            first = before if before is not None and before.free else unmapped
            if _free_space(first, size) >= size:
                return first
        block = _Block(self._new_address(_ADDRESS_SPACE), _ADDRESS_SPACE, pool, mapped=False)
        pool.add(block)
        return block

    def _map(self, block: _Block, size: int) -> _Block | None:
        """Give memory to the first ``size`` bytes of an unmapped block, in whole pages.

        Return the free block that these pages then belong to. ``None``: the device has too little memory.
        """
        pool = block.pool
        size = _up(size, pool.segment)
        if not self._reserve(size):
            return None
        pool.remove(block)
        if size < block.size:
            pool.add(block.cut(size))
        block.mapped = True
        block = _joined(block)
        pool.add(block)
        return block

    def _release(self) -> None:
        """Give back unused segments. Of an expandable segment, give back the pages that are wholly free."""
        for pool in (pool for small, large in self._pools.values() for pool in (large, small)):
            # `free_blocks` returns a copy, because the loop removes blocks from the pool.
            for block in pool.free_blocks():
                if self._expandable:
                    self._unmap(block)
                elif block.before is None and block.after is None:
                    pool.remove(block)
                    self.reserved -= block.size

    def _unmap(self, block: _Block) -> None:
        pool = block.pool
        # The block can begin inside a page whose first bytes are in use. This page stays mapped.
        skipped = -block.address % pool.segment
        size = (block.size - skipped) // pool.segment * pool.segment
        if size <= 0:
            return
        pool.remove(block)
        if skipped:
            block, first = block.cut(skipped), block
            pool.add(first)
        if size < block.size:
            pool.add(block.cut(size))
        block.mapped = False
        self.reserved -= size
        block = _joined(block)
        # Without neighbours, the whole segment is free, and its address space is given back.
        if block.before is not None or block.after is not None:
            pool.add(block)


def _segment_size(pool: _Pool, size: int) -> int:
    small_enough = pool.segment == _SMALL_SEGMENT or size < _OWN_SEGMENT
    return pool.segment if small_enough else _up(size, _SEGMENT_ROUNDING)


def _joined(block: _Block) -> _Block:
    """Join a block, which is in no pool, with its free neighbours, and return the whole."""
    for neighbour in (block.before, block.after):
        if neighbour is None or not neighbour.free or neighbour.mapped is not block.mapped:
            continue
        block.pool.remove(neighbour)
        first, second = (neighbour, block) if neighbour is block.before else (block, neighbour)
        first.size += second.size
        first.after = second.after
        if first.after is not None:
            first.after.before = first
        block = first
    return block


def _free_space(block: _Block, enough: int) -> int:
    """Return the bytes of a block and of the blocks behind it up to the first one in use, or ``enough``."""
    space = 0
    for part in _from(block):
        if space >= enough or not part.free:
            break
        space += part.size
    return space


def _from(block: _Block | None) -> Iterator[_Block]:
    while block is not None:
        yield block
        block = block.after


def _up(size: int, multiple: int) -> int:
    return -(-size // multiple) * multiple

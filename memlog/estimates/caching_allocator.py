"""Model of CUDA's caching allocator. It computes the bytes that the allocator reserves for allocations.

The rules are those of torch's ``c10/cuda/CUDACachingAllocator.cpp`` and ``c10/core/AllocatorConfig.h`` (torch
2.13) with their default settings, for one stream. docs/estimates.md describes how the model was checked.
"""

from __future__ import annotations

from bisect import bisect_left, insort
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


class OutOfMemoryError(Exception):
    """Error: the limit is too small for an allocation, even after unused segments are released."""


class _Block:
    """Part of a segment, free or in use. ``before`` and ``after`` are its neighbours in the segment."""

    __slots__ = ("address", "after", "before", "free", "pool", "size")

    def __init__(self, address: int, size: int, pool: _Pool) -> None:
        self.address = address
        self.size = size
        self.pool = pool
        self.free = True
        self.before: _Block | None = None
        self.after: _Block | None = None

    def cut(self, size: int) -> _Block:
        """Keep the first ``size`` bytes in this block, and return a new block with the other bytes."""
        rest = _Block(self.address + size, self.size - size, self.pool)
        rest.before, rest.after = self, self.after
        if self.after is not None:
            self.after.before = rest
        self.after = rest
        self.size = size
        return rest


class _Pool:
    """Free blocks, in the order in which the allocator searches them: by size, then by address.

    Args:
        segment: Bytes of a new segment, and of each page by which an expandable segment grows.
        smallest_rest: Minimum number of bytes that remain free if a block is split. If fewer bytes would
            remain, the whole block is used.
    """

    def __init__(self, segment: int, smallest_rest: int) -> None:
        self.segment = segment
        self.smallest_rest = smallest_rest
        self._free: list[tuple[int, int, _Block]] = []

    def add(self, block: _Block) -> None:
        insort(self._free, (block.size, block.address, block))

    def remove(self, block: _Block) -> None:
        del self._free[bisect_left(self._free, (block.size, block.address))]

    def take(self, size: int) -> _Block | None:
        """Remove and return the smallest free block of at least ``size`` bytes; ``None`` if there is none."""
        at = bisect_left(self._free, (size, 0))
        return self._free.pop(at)[2] if at < len(self._free) else None

    def free_blocks(self) -> list[_Block]:
        return [block for _size, _address, block in self._free]


class CachingAllocator:
    """Allocator that keeps freed blocks, and uses them for later allocations.

    Args:
        limit: Maximum number of bytes that the allocator may reserve; ``None``: no limit.
        expandable: True if segments grow, as with ``expandable_segments:True``.

    Attributes:
        reserved: Bytes that the allocator holds, in use or free.
        most_reserved: Highest ``reserved`` so far.
    """

    def __init__(self, limit: int | None = None, *, expandable: bool = False) -> None:
        self.reserved = self.most_reserved = 0
        self._limit = limit
        self._expandable = expandable
        self._small = _Pool(_SMALL_SEGMENT, ROUNDING)
        self._large = _Pool(_LARGE_SEGMENT, ROUNDING if expandable else SMALL_BLOCK + 1)
        self._ends: dict[_Pool, _Block] = {}
        self._next_address = 0
        self._used: dict[int, _Block] = {}

    def allocate(self, key: int, size: int) -> None:
        """Allocate ``size`` bytes. `free` frees them by ``key``.

        Raises:
            OutOfMemoryError: The bytes do not fit below the limit.
        """
        size = _up(max(size, 1), ROUNDING)
        pool = self._small if size <= SMALL_BLOCK else self._large
        new_block = self._grow if self._expandable else self._new_segment
        block = pool.take(size) or new_block(pool, size)
        if block.size - size >= pool.smallest_rest:
            rest = block.cut(size)
            pool.add(rest)
            if self._ends.get(pool) is block:
                self._ends[pool] = rest
        block.free = False
        self._used[key] = block

    def free(self, key: int) -> None:
        block = self._used.pop(key)
        block.free = True
        if block.after is not None and block.after.free:
            block.pool.remove(block.after)
            self._join(block, block.after)
        if block.before is not None and block.before.free:
            block.pool.remove(block.before)
            self._join(block.before, block)
            block = block.before
        block.pool.add(block)

    def _join(self, block: _Block, following: _Block) -> None:
        """Add ``following`` to ``block``. Both are free, and ``following`` lies directly after ``block``."""
        if self._ends.get(block.pool) is following:
            self._ends[block.pool] = block
        block.size += following.size
        block.after = following.after
        if block.after is not None:
            block.after.before = block

    def _new_segment(self, pool: _Pool, size: int) -> _Block:
        small_enough = pool is self._small or size < _OWN_SEGMENT
        segment = pool.segment if small_enough else _up(size, _SEGMENT_ROUNDING)
        self._reserve(segment)
        block = _Block(self._next_address, segment, pool)
        self._next_address += segment + _SEGMENT_ROUNDING
        return block

    def _grow(self, pool: _Pool, size: int) -> _Block:
        """Extend the pool's only segment at its end, and return the free block there."""
        added = self._lacking(pool, size)
        if self._is_too_much(added):
            self._release()  # this may also release the free block at the end
            added = self._lacking(pool, size)
        self._reserve(added)
        end = self._ends.get(pool)
        if end is not None and end.free:
            pool.remove(end)
            end.size += added
            return end
        # Each pool has addresses of its own, far from the other's.
        begin = (1 << 60 if pool is self._large else 0) if end is None else end.address + end.size
        block = _Block(begin, added, pool)
        if end is not None:
            end.after, block.before = block, end
        self._ends[pool] = block
        return block

    def _lacking(self, pool: _Pool, size: int) -> int:
        """Return the bytes, in whole pages, by which the pool must grow to allocate ``size`` bytes."""
        end = self._ends.get(pool)
        there = end.size if end is not None and end.free else 0
        return _up(size - there, pool.segment)

    def _is_too_much(self, size: int) -> bool:
        return self._limit is not None and self.reserved + size > self._limit

    def _reserve(self, size: int) -> None:
        if self._is_too_much(size):
            self._release()
            if self._is_too_much(size):
                raise OutOfMemoryError
        self.reserved += size
        self.most_reserved = max(self.most_reserved, self.reserved)

    def _release(self) -> None:
        """Give back the unused segments. Of an expandable segment, give back the free pages at its end."""
        for pool in (self._small, self._large):
            for block in pool.free_blocks():
                if self._expandable:
                    self._release_end(pool, block)
                elif block.before is None and block.after is None:
                    pool.remove(block)
                    self.reserved -= block.size

    def _release_end(self, pool: _Pool, block: _Block) -> None:
        if block is not self._ends[pool]:
            return
        pages = block.size // pool.segment * pool.segment
        if pages:
            pool.remove(block)
            block.size -= pages
            self.reserved -= pages
            if block.size:
                pool.add(block)
            else:
                self._forget_end(pool, block)

    def _forget_end(self, pool: _Pool, block: _Block) -> None:
        if block.before is None:
            del self._ends[pool]
        else:
            block.before.after = None
            self._ends[pool] = block.before


def _up(size: int, multiple: int) -> int:
    return -(-size // multiple) * multiple

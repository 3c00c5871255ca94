"""Ends of unsplit blocks, on a simulated allocator that splits and joins blocks by torch's rules."""

from __future__ import annotations

from typing import Any

from hypothesis import given
from hypothesis import strategies as st
from support.device_snapshots import MIB, History, block, segment, snapshot

from memlog.trace.cuda_join import unsplit_bytes

SEGMENTS = {
    0x7F00_0000_0000: 20 * MIB,
    0x7F00_0000_0000 + 20 * MIB: 20 * MIB,
    0x7F10_0000_0000: 30 * MIB,
}
HALF = MIB // 2


class Allocator:
    """Segments of blocks. A block has an address, a size, and the requested size if it is in use."""

    def __init__(self) -> None:
        self.blocks: list[list[Any]] = []
        for address, size in SEGMENTS.items():
            self.blocks.append([address, size, None])

    def allocate(self, size: int) -> tuple[int, int] | None:
        """Return the address and the bytes beyond ``size``; ``None`` if no free block is large enough."""
        free = [one for one in self.blocks if one[2] is None and one[1] >= size]
        if not free:
            return None
        best = min(free, key=lambda one: (one[1], one[0]))
        if best[1] - size > MIB:
            self.blocks.append([best[0] + size, best[1] - size, None])
            best[1] = size
        best[2] = size
        self.blocks.sort()
        return best[0], best[1] - size

    def free(self, address: int) -> None:
        for one in self.blocks:
            if one[0] == address:
                one[2] = None
        joined: list[list[Any]] = []
        for one in self.blocks:
            before = joined[-1] if joined else None
            if before is None or one[0] in SEGMENTS or before[2] is not None or one[2] is not None:
                joined.append(one)
            else:
                before[1] += one[1]
        self.blocks = joined

    def snapshot(self, history: History) -> Any:
        segments = []
        for start, size in SEGMENTS.items():
            inside = [
                block(address, length, "inactive" if requested is None else "active_allocated")
                for address, length, requested in self.blocks
                if start <= address < start + size
            ]
            segments.append(segment(*inside, address=start))
        return snapshot(*segments, history=history.entries)


operations = st.lists(st.tuples(st.booleans(), st.integers(3, 24), st.integers(0, 9)), max_size=40)


@given(operations, operations)
def test_ends_of_unsplit_blocks_are_found(
    before: list[tuple[bool, int, int]], within: list[tuple[bool, int, int]]
) -> None:
    allocator, history = Allocator(), History()
    live: dict[int, tuple[int, int]] = {}
    truth: dict[int, int] = {}
    for traced, steps in ((False, before), (True, within)):
        for allocates, halves, which in steps:
            if allocates:
                found = allocator.allocate(halves * HALF)
                if found is None:
                    continue
                live[found[0]] = halves * HALF, found[1]
                if traced:
                    history.alloc(found[0], halves * HALF)
                    truth[len(history.entries) - 1] = found[1]
            elif live:
                address = sorted(live)[which % len(live)]
                size, _ = live.pop(address)
                allocator.free(address)
                if traced:
                    history.free(address, size)
    found = unsplit_bytes(history.entries, allocator.snapshot(history), 0)
    assert found.made == {index: rest for index, rest in truth.items() if rest}


def test_small_and_expandable_blocks_are_always_split() -> None:
    history = History()
    history.alloc(0x7F00_0000_0000, 3 * MIB)
    small = segment(block(0x7F00_0000_0000, 4 * MIB, "active_allocated"))
    for kind in ({"segment_type": "small"}, {"is_expandable": True}):
        document = snapshot({**small, **kind}, history=history.entries)
        assert unsplit_bytes(history.entries, document, 0).made == {}
    document = snapshot(small, history=history.entries)
    assert unsplit_bytes(history.entries, document, 0).made == {0: MIB}
    assert unsplit_bytes(history.entries, document, 1).made == {}


def test_a_segment_that_the_trace_makes_and_gives_back_is_known() -> None:
    history = History()
    history.say("segment_alloc", addr=0x7F00_0000_0000, size=20 * MIB)
    history.alloc(0x7F00_0000_0000, 19 * MIB + HALF)
    history.free(0x7F00_0000_0000, 19 * MIB + HALF)
    history.say("segment_free", addr=0x7F00_0000_0000, size=20 * MIB)
    assert unsplit_bytes(history.entries, snapshot(history=history.entries), 0).made == {1: HALF}


def test_the_end_of_a_block_from_before_the_trace_is_freed_with_it() -> None:
    history = History()
    history.free(0x7F00_0000_0000, 3 * MIB)
    document = snapshot(
        segment(
            block(0x7F00_0000_0000, 4 * MIB, "inactive"),
            block(0x7F00_0000_0000 + 4 * MIB, 4 * MIB, "active_allocated"),
        ),
        history=history.entries,
    )
    assert unsplit_bytes(history.entries, document, 0).older == {0x7F00_0000_0000: MIB}

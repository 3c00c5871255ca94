"""Storages older than the window that are classified in it: on invented histories with known truth."""

from __future__ import annotations

import itertools
from typing import NamedTuple

from hypothesis import given
from hypothesis import strategies as st
from support.device_snapshots import History

from memlog.trace.accounting import Accountant
from memlog.trace.cuda_join import ExistingStorage, HistoryJoin, HookMark, LiveBlock, label
from memlog.trace.encoding import (
    ALLOC,
    BEFORE,
    BUFFER,
    CLASSIFY,
    ENTER,
    FORWARD,
    GRADIENT,
    OPTIMIZER_STATE,
    OTHER,
    OUTSIDE,
    PARAMETER,
    PRIVATE_POOL,
    UNDECIDED,
    WORKSPACE,
    StreamEvent,
    decode,
)

ADDRESSES = [0x7F00_0000_0000 + 2**20 * number for number in range(8)]
CLASSIFIED = (PARAMETER, BUFFER, GRADIENT, OPTIMIZER_STATE)


class Truth:
    """A storage of the program. Each has a size of its own, by which it is found in the stream."""

    def __init__(self, size: int) -> None:
        self.size = size
        self.classified: tuple[int, int] | None = None


class Program:
    """A program that allocates, frees and classifies, traced from some moment on."""

    def __init__(self) -> None:
        self.history = History()
        self.marks: list[HookMark] = []
        self.existing: list[ExistingStorage] = []
        self.opening: int | None = None
        self.live: dict[int, Truth] = {}
        self.ever: list[Truth] = []
        self.sizes = itertools.count(512, 512)

    @property
    def note(self) -> str:
        return label(len(self.marks) - 1) if self.marks else ""

    def start(self) -> None:
        self.opening = sum(storage.size for storage in self.live.values())
        self.existing = [
            ExistingStorage(address, storage.size, storage.classified[1], storage.classified[0])
            for address, storage in self.live.items()
            if storage.classified is not None
        ]
        self.ever = list(self.live.values())

    def allocate(self, address: int) -> None:
        if address not in self.live:
            storage = self.live[address] = Truth(next(self.sizes))
            self.ever.append(storage)
            if self.opening is not None:
                self.history.alloc(address, storage.size, self.note)

    def free(self, address: int) -> None:
        storage = self.live.pop(address, None)
        if storage is not None and self.opening is not None:
            self.history.free(address, storage.size, self.note)

    def classify(self, address: int, category: int, layer: int) -> None:
        """Record a storage's category as the engine does: at the start, or by a mark."""
        storage = self.live.get(address)
        if storage is None:
            return
        storage.classified = category, layer
        if self.opening is None:
            return
        self.marks.append(
            HookMark(
                0, CLASSIFY, layer, 0, 0, address=address, size=storage.size, category=category
            )
        )

    def enter(self) -> None:
        if self.opening is not None:
            self.marks.append(HookMark(0, ENTER, 1, FORWARD, 0))

    def events(self, *, blocks: bool) -> list[StreamEvent]:
        found = {
            address: LiveBlock(one.size, one.size, False) for address, one in self.live.items()
        }
        join = HistoryJoin(
            self.marks,
            self.existing,
            blocks=found if blocks else None,
            opening=self.opening,
            started_us=1_000_000,
        )
        return list(decode(b"".join(join.events(self.history.entries))))


class Operation(NamedTuple):
    kind: str
    address: int
    category: int
    layer: int


operations = st.lists(
    st.builds(
        Operation,
        st.sampled_from(("allocate", "allocate", "free", "classify", "classify", "enter")),
        st.sampled_from(ADDRESSES),
        st.sampled_from(CLASSIFIED),
        st.integers(OUTSIDE, 3),
    ),
    max_size=30,
)


def run(program: Program, steps: list[Operation]) -> None:
    for kind, address, category, layer in steps:
        match kind:
            case "allocate":
                program.allocate(address)
            case "free":
                program.free(address)
            case "classify":
                program.classify(address, category, layer)
            case _:
                program.enter()


@given(operations, operations, st.booleans())
def test_each_storage_has_the_category_that_it_was_given_while_it_lived(
    before: list[Operation], within: list[Operation], blocks: bool
) -> None:
    program = Program()
    run(program, before)
    program.start()
    run(program, within)
    events = program.events(blocks=blocks)

    older = [event.size for event in events if event.kind == ALLOC and event.phase == BEFORE]
    assert sum(older) == program.opening
    found: dict[int, tuple[int, int]] = {}
    sizes: dict[int, int] = {}
    for event in events:
        if event.kind == ALLOC:
            sizes[event.key] = event.size
        if event.kind in (ALLOC, CLASSIFY) and event.category not in (UNDECIDED, OTHER):
            found[sizes[event.key]] = event.category, event.layer
    assert found == {one.size: one.classified for one in program.ever if one.classified is not None}


def test_memory_of_another_allocator_is_not_counted() -> None:
    marks = [HookMark(0, CLASSIFY, 1, 0, 0, address=ADDRESSES[1], size=4096, category=GRADIENT)]
    existing = [ExistingStorage(ADDRESSES[0], 4096, 1, PARAMETER)]
    blocks = {ADDRESSES[2]: LiveBlock(512, 512, False)}
    join = HistoryJoin(marks, existing, blocks=blocks, opening=512, started_us=0)
    accountant = Accountant()
    accountant.fold(b"".join(join.events([])))
    accountant.finish()
    assert [(one.size, one.final_category) for one in accountant.at_peak] == [(512, OTHER)]


def test_private_pools_are_told_from_other_memory() -> None:
    """Blocks in private pools have a category of their own, also if the window frees them."""
    kept, freed, gradient, common = ADDRESSES[:4]
    history = History()
    history.say("free_requested", addr=freed, size=1024, pool_id=(1, 0))
    marks = [HookMark(0, CLASSIFY, 2, 0, 0, address=gradient, size=2048, category=GRADIENT)]
    blocks = {
        kept: LiveBlock(512, 512, True),
        gradient: LiveBlock(2048, 2048, True),
        common: LiveBlock(4096, 4096, False),
    }
    join = HistoryJoin(marks, [], blocks=blocks, opening=7680, started_us=1_000_000)
    accountant = Accountant()
    accountant.fold(b"".join(join.events(history.entries)))
    accountant.finish()
    assert sorted((one.size, one.final_category) for one in accountant.at_peak) == [
        (512, PRIVATE_POOL),
        (1024, PRIVATE_POOL),
        (2048, GRADIENT),
        (4096, OTHER),
    ]


def test_a_workspace_counts_for_no_layer() -> None:
    """Layer 1 multiplies first, so it makes the workspace. It adds, allocates and keeps its tensor only."""
    old, made, tensor = ADDRESSES[:3]
    marks = [
        HookMark(0, ENTER, 1, FORWARD, 0, owner=(1, FORWARD)),
        HookMark(9_000_000, ENTER, 2, FORWARD, 0, owner=(2, FORWARD)),
    ]
    history = History()
    history.alloc(made, 1024, label(0))  # a tensor that is freed again
    history.free(made, 1024, label(0))
    history.alloc(made, 8 << 20, label(0))
    history.alloc(tensor, 512, label(0))
    join = HistoryJoin(
        marks,
        [ExistingStorage(old, 0, OUTSIDE, WORKSPACE), ExistingStorage(made, 0, OUTSIDE, WORKSPACE)],
        blocks={address: LiveBlock(8 << 20, 8 << 20, False) for address in (old, made)},
        workspaces={old, made},
        opening=8 << 20,
        started_us=1_000_000,
    )
    accountant = Accountant()
    accountant.fold(b"".join(join.events(history.entries)))
    accountant.finish()
    assert accountant.peak_bytes == (8 << 20) + 512
    assert accountant.added[1] == 1024
    row = accountant.rows[1, FORWARD]
    assert (row.allocated, row.kept, row.peak) == (1024 + 512, 512, (8 << 20) + 512)
    workspaces = [one for one in accountant.at_peak if one.final_category == WORKSPACE]
    assert [(one.size, one.layer) for one in workspaces] == [(8 << 20, OUTSIDE)] * 2

"""Native history joined with layers: on histories made up by hand, and on one that a CPU really made.

No device is needed here; `tests/integration/tracer/test_tracer_cuda.py` holds the same against a real one.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from support.device_snapshots import History
from support.histories import SimulatedHistory
from support.models import GPT, text
from torch import nn

from memlog._internal.diagnostics import Diagnostics
from memlog.trace.accounting import Accountant
from memlog.trace.cuda_join import (
    NO_EVENT,
    ExistingStorage,
    HistoryJoin,
    HookMark,
    label,
    number_of,
    of_segments,
    of_statistics,
)
from memlog.trace.encoding import (
    ALLOC,
    BACKWARD,
    BEFORE,
    CLASSIFY,
    ENTER,
    EXIT,
    FORWARD,
    GRADIENT,
    OPTIMIZER,
    OPTIMIZER_STATE,
    OTHER,
    OUTSIDE,
    PARAMETER,
    PHASE_CHANGE,
    READING,
    decode,
)
from memlog.tracer.engines import patches
from memlog.tracer.engines.cpu import DispatchEngine
from memlog.tracer.engines.cuda import NativeEngine
from memlog.tracer.engines.live_storages import LiveStorages
from memlog.tracer.engines.storage_events import EventLog
from memlog.tracer.module_names import ModuleNames

A, B, C, D = 0x7F0000000000, 0x7F0000001000, 0x7F0000002000, 0x7F0000003000


def joined(
    marks: list[HookMark],
    history: History,
    existing: tuple[ExistingStorage, ...] = (),
    **options: Any,
) -> Accountant:
    join = HistoryJoin(marks, existing, **{"opening": None, "started_us": 1_000_000, **options})
    accountant = Accountant()
    accountant.fold(b"".join(join.events(history.entries)))
    accountant.finish()
    return accountant


@pytest.mark.seed(201)
def test_each_allocation_belongs_to_the_last_change_on_its_thread() -> None:
    marks = [
        HookMark(1000, ENTER, 1, FORWARD, 0, owner=(1, FORWARD)),
        HookMark(2000, ENTER, 2, FORWARD, 0, owner=(2, FORWARD)),
        HookMark(3000, EXIT, 2, FORWARD, 0, owner=(1, FORWARD)),
        HookMark(4000, EXIT, 1, FORWARD, 0, owner=(OUTSIDE, FORWARD)),
        HookMark(5000, PHASE_CHANGE, 2, BACKWARD, 1, owner=(2, BACKWARD)),
        HookMark(6000, PHASE_CHANGE, OUTSIDE, OPTIMIZER, 0, owner=(OUTSIDE, OPTIMIZER)),
    ]
    history = History()
    history.alloc(A, 1000, label(0))
    history.alloc(B, 600, label(1))
    history.alloc(C, 512, label(2))
    history.say("segment_alloc", addr=A, size=2 << 20)
    history.alloc(D, 4096, label(4))
    history.free(B, 600, label(4))
    history.say("an action of the future", whatever=1)
    history.say("oom", user_metadata=label(4), size=1 << 40)  # it has no address
    history.free(D, 4096, label(5))
    accountant = joined(marks, history)

    allocated = {key: row.allocated for key, row in accountant.rows.items() if row.allocated}
    assert allocated == {(1, FORWARD): 1024 + 512, (2, FORWARD): 1024, (2, BACKWARD): 4096}
    assert accountant.peak_bytes == 1024 + 1024 + 512 + 4096
    assert accountant.live_bytes == 1024 + 512
    assert accountant.rows[2, FORWARD].frees == 1
    assert accountant.rows[1, FORWARD].calls == 1


def test_a_modules_inputs_are_the_serials_of_their_storages() -> None:
    marks = [
        HookMark(1000, PHASE_CHANGE, OUTSIDE, FORWARD, 0),
        HookMark(2000, ENTER, 1, FORWARD, 0, inputs=(B, A)),
        HookMark(3000, ENTER, 2, FORWARD, 0, inputs=(C, 0)),  # its allocation was not recorded
        HookMark(4000, ENTER, 3, FORWARD, 0, inputs=(-1, 0)),
    ]
    history = History()
    history.alloc(A, 512, label(0))
    history.alloc(B, 1024, label(0))
    join = HistoryJoin(marks, [], opening=10_000, started_us=0)
    events = list(decode(b"".join(join.events(history.entries))))
    serials = {event.size: event.key for event in events if event.kind == ALLOC}
    entered = [(event.key, event.size) for event in events if event.kind == ENTER]
    assert entered == [(serials[1024], serials[512]), (0, 0), (-1, 0)]


def test_a_stale_note_on_an_autograd_thread_counts_for_no_layer() -> None:
    marks = [
        # the first step's backward pass
        HookMark(1000, PHASE_CHANGE, 7, BACKWARD, 1, owner=(7, BACKWARD)),
        HookMark(2000, ENTER, 1, FORWARD, 0, owner=(1, FORWARD)),  # the second step
        HookMark(3000, EXIT, 1, FORWARD, 0),
        HookMark(4000, PHASE_CHANGE, 1, BACKWARD, 1, owner=(1, BACKWARD)),
    ]
    history = History()
    history.alloc(A, 512, label(0))
    history.alloc(B, 512, label(1))
    history.alloc(C, 512, label(0))  # the second backward pass begins outside all modules
    history.alloc(D, 512, label(3))
    accountant = joined(marks, history)
    assert accountant.rows[7, BACKWARD].allocations == 1
    assert accountant.rows[OUTSIDE, BACKWARD].allocations == 1
    assert accountant.rows[1, BACKWARD].allocations == 1


def test_a_note_of_an_earlier_trace_names_no_mark_of_this_one() -> None:
    """Such a note stays on a thread of autograd's. This one computes gradients of the loss."""
    marks = [
        HookMark(1000, NO_EVENT, OUTSIDE, FORWARD, 0),
        HookMark(2000, ENTER, 1, FORWARD, 0, owner=(1, FORWARD)),
        HookMark(3000, EXIT, 1, FORWARD, 0, owner=(OUTSIDE, FORWARD)),
        HookMark(4000, PHASE_CHANGE, 1, BACKWARD, 1, owner=(1, BACKWARD)),
    ]
    history = History()
    history.alloc(A, 512, label(101))
    history.alloc(B, 1024, label(3))  # from an earlier trace
    history.alloc(C, 2048, label(102))
    history.alloc(D, 4096, label(2))
    accountant = joined(marks, history, first_number=100)
    allocated = {key: row.allocated for key, row in accountant.rows.items() if row.allocated}
    assert allocated == {
        (1, FORWARD): 512,
        (OUTSIDE, FORWARD): 1024 + 2048,
        (OUTSIDE, BACKWARD): 4096,
    }


def test_storages_from_before_the_window_are_live_from_its_start() -> None:
    history = History()
    history.alloc(C, 512)
    history.free(B, 2048)  # not known, but live before the window
    existing = (ExistingStorage(A, 4096, 3, PARAMETER),)
    accountant = joined([], history, existing, opening=10_240)

    assert accountant.before_bytes == 10_240
    assert accountant.peak_bytes == 512
    before = [
        (held.size, held.final_category) for held in accountant.at_peak if held.phase == BEFORE
    ]
    assert sorted(before) == [(2048, OTHER), (4096, PARAMETER), (4096, OTHER)]
    assert sum(held.size for held in accountant.at_peak) == 10_240 + 512
    assert accountant.live_bytes == 512 - 2048


def test_a_storage_allocated_in_the_history_is_not_from_before() -> None:
    """A model that the tracer first sees when it is called may have been created in the window."""
    history = History()
    history.alloc(A, 4096)
    history.free(B, 512)
    history.alloc(B, 512)
    existing = (ExistingStorage(A, 4096, 3, PARAMETER), ExistingStorage(B, 512, 3, PARAMETER))
    accountant = joined([], history, existing)
    assert (accountant.before_bytes, accountant.peak_bytes) == (512, 4096)
    assert accountant.live_bytes == 4096


def test_a_block_is_classified_by_its_storage_at_that_moment() -> None:
    marks = [
        HookMark(1000, ENTER, 1, FORWARD, 0, owner=(1, FORWARD)),
        HookMark(2000, CLASSIFY, 5, 0, 0, address=A, category=GRADIENT),
        HookMark(3000, EXIT, 1, FORWARD, 0),
    ]
    history = History()
    history.alloc(A, 512, label(0))
    history.alloc(B, 512, label(2))
    history.free(A, 512, label(2))
    history.alloc(A, 1024, label(2))  # another storage at the same address
    accountant = joined(marks, history)
    assert not any(held.final_category == GRADIENT for held in accountant.at_peak)
    assert not any(held.layer == 5 for held in accountant.at_peak)
    assert accountant.peak_bytes == 1536


@pytest.mark.parametrize(
    ("marks", "in_layer"),
    [
        ([HookMark(7_000, ENTER, 1, FORWARD, 0, owner=(1, FORWARD))], 1),
        (
            [
                HookMark(1_000, ENTER, 1, FORWARD, 0, owner=(1, FORWARD)),
                HookMark(2_000, CLASSIFY, 5, 0, 0, address=A, category=PARAMETER),
            ],
            2,
        ),
    ],
    ids=["changes", "a category between changes"],
)
def test_without_notes_allocations_are_attributed_by_time(
    marks: list[HookMark], in_layer: int
) -> None:
    history = History()
    for address in (A, B, C):
        history.alloc(address, 512)  # 0, 5 and 10 microseconds after the start
    end = HookMark(12_000, EXIT, 1, FORWARD, 0)
    accountant = joined([*marks, end], history, by_time=True)
    assert accountant.rows[1, FORWARD].allocations == in_layer
    assert accountant.rows[OUTSIDE, FORWARD].allocations == 3 - in_layer


@pytest.mark.parametrize("note", ["", "user's own", "mlxyz", None, 3, "ml"])
def test_foreign_notes_are_ignored(note: Any) -> None:
    assert number_of(note) is None


def test_notes_stay_short() -> None:
    assert len(label(10**12)) <= 15
    assert number_of(label(10**12)) == 10**12


@pytest.mark.seed(196, 204, 205, 246)
def test_fragmentation_is_recognised_by_the_blocks() -> None:
    segments = [
        {
            "device": 0,
            "total_size": 1000,
            "blocks": [
                {"size": 600, "state": "active_allocated"},
                {"size": 300, "state": "inactive"},
                {"size": 100, "state": "active_pending_free"},
            ],
        },
        {"device": 0, "total_size": 1000, "blocks": [{"size": 1000, "state": "inactive"}]},
        {"device": 1, "total_size": 9000, "blocks": []},
    ]
    found = of_segments(segments, 0)
    assert (found.reserved, found.allocated, found.inactive_split) == (2000, 600, 300)
    assert found.ratio == (2000 - 600) / 2000
    assert of_segments(segments, 2) is None
    assert of_statistics(0, 0) is None


class Run:
    """One step under two engines: the native one on a simulated history, the CPU engine as reference."""

    def __init__(self, model: nn.Module, *, known: bool = True) -> None:
        self.health = Diagnostics()
        names = [ModuleNames(model if known else None) for _ in range(2)]
        logs = [EventLog(10**6, Accountant()) for _ in range(2)]
        history: Any = SimulatedHistory()
        engines: list[Any] = [
            DispatchEngine(logs[0], names[0], self.health),
            NativeEngine(logs[1], names[1], self.health, history, readings=True),
        ]
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
        batch = text()
        for engine in engines:
            engine.start()
        for _ in range(2):
            optimizer.zero_grad()
            model(batch).square().mean().backward()
            optimizer.step()
        for number in (1, 0):
            engines[number].stop()
            logs[number].close()
        self.books = [log.accountant for log in logs]
        self.rows = [
            {
                (own.paths[layer], phase): row.allocations
                for (layer, phase), row in books.rows.items()
                if row.allocations
            }
            for own, books in zip(names, self.books, strict=True)
        ]


@pytest.mark.parametrize("checkpointing", [None, "reentrant", "not reentrant"])
def test_hooks_and_notes_find_what_the_dispatch_engine_finds(
    checkpointing: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    # The simulation sees results only, neither the workspace of operations nor the states of the CPU's
    # generator, which a device's allocator does not hold.
    monkeypatch.setattr(LiveStorages, "add_workspace", lambda *_, **__: ())
    monkeypatch.setattr(patches.RANDOM_STATE_COPIES, "add", lambda _: None)
    run = Run(GPT(checkpointing=checkpointing))
    assert not run.health.faults
    truth, found = run.rows
    total = sum(truth.values())
    assert sum(found.values()) == total
    agreeing = sum(min(count, found.get(key, 0)) for key, count in truth.items())
    assert agreeing / total > 0.9
    layers = [key for key in truth if key[1] == FORWARD and "mlp" in key[0]]
    assert layers
    assert {key: found[key] for key in layers} == {key: truth[key] for key in layers}


@pytest.mark.parametrize("known", [True, False])
def test_categories_are_found_by_address(known: bool) -> None:
    run = Run(GPT(), known=known)
    truth, found = (
        {
            category: sum(h.size for h in accountant._live.values() if h.final_category == category)
            for category in (PARAMETER, GRADIENT, OPTIMIZER_STATE)
        }
        for accountant in run.books
    )
    assert min(truth.values()) > 0
    assert found == pytest.approx(truth, rel=0.1)  # blocks are rounded up


@pytest.mark.parametrize("wanted", [True, False])
@pytest.mark.seed(176, 190, 225)
def test_layers_read_the_allocator_where_that_is_wanted(wanted: bool) -> None:
    """``enable_fragmentation_tracking``: the allocator's statistics at each change of layer, or none."""
    model, health = GPT(), Diagnostics()
    names, accountant = ModuleNames(model), Accountant()
    log = EventLog(10**6, accountant)
    history: Any = SimulatedHistory()
    engine = NativeEngine(log, names, health, history, readings=wanted)
    engine._read = lambda: (600, 1000)  # statistics of a device's allocator
    engine.start()
    model(text()).sum().backward()
    engine.stop()
    events, _ = log.close()
    read = [event for event in decode(events) if event.kind == READING]
    assert not health.faults
    if wanted:
        assert {(event.key, event.size) for event in read} == {(600, 1000)}
        assert len(read) > 2 * len(list(model.modules()))
    else:
        assert read == []

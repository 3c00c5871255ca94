"""Flame graphs of an allocator's snapshot."""

import contextlib
from collections import Counter
from typing import Any

import pytest
import torch
from support import device_snapshots as made
from support import speedscope
from support.device_snapshots import BASE, MIB

from memlog import MemoryTracer, SnapshotError
from memlog.trace import exporters
from memlog.trace.exporters import snapshot_graph

MODEL = ("main (/src/main.py:1)", "model (/src/model.py:2)")
FORWARD = ("main (/src/main.py:1)", "forward (/src/forward.py:2)")
HEAD = ("main (/src/main.py:1)", "head (/src/head.py:2)")


def profiles(snapshot: dict[str, Any]) -> dict[str, Counter[tuple[str, ...]]]:
    """Check a document, and return the bytes by stack of every profile."""
    document = snapshot_graph(snapshot, "s.pickle").document
    speedscope.check(document)
    found: dict[str, Counter[tuple[str, ...]]] = {}
    for number, profile in enumerate(document["profiles"]):
        sizes = found[profile["name"]] = Counter()
        for stack, weight in speedscope.stacks(document, number):
            sizes[stack] += weight
    return found


def test_live_bytes_are_reserved_and_in_the_peak() -> None:
    found = profiles(made.training())
    assert list(found) == [
        "Live bytes, device 0",
        "Live bytes at the peak of the history, device 0",
        "Reserved bytes by segment, device 0",
        "Bytes allocated, in order, device 0",
    ]
    assert found["Live bytes, device 0"] == {
        MODEL: 8 * MIB,
        HEAD: 4 * MIB,
        (*FORWARD, "[freed, waiting for another stream]"): MIB,
    }
    # The model was live before the history began; the blocks hold its stacks.
    assert found["Live bytes at the peak of the history, device 0"] == {
        MODEL: 8 * MIB,
        FORWARD: 16 * MIB,
        HEAD: 4 * MIB,
    }
    segment = f"segment {BASE:#x}, 64.0 MiB"
    assert found["Reserved bytes by segment, device 0"] == {
        ("large pool", segment, "[allocated]"): 12 * MIB,
        ("large pool", segment, "[freed, waiting for another stream]"): MIB,
        ("large pool", segment, "[unused]"): 51 * MIB,
    }
    assert found["Bytes allocated, in order, device 0"] == {FORWARD: 16 * MIB, HEAD: 4 * MIB}
    assert snapshot_graph(made.training(), "x").notes == (
        "device 0: 1 allocations failed, the last for 2.0 GiB",
    )


def test_a_snapshot_without_history_shows_live_and_reserved_bytes() -> None:
    whole = made.training()
    found = profiles({**whole, "device_traces": [[]]})
    assert list(found) == ["Live bytes, device 0", "Reserved bytes by segment, device 0"]


def test_blocks_without_frames_are_known_otherwise() -> None:
    history = made.History()
    history.alloc(BASE, 2 * MIB, frames=made.frames("main", "forward"))
    history.alloc(BASE + 2 * MIB, MIB, "encoder.0")
    live = [
        made.block(BASE, 2 * MIB, "active_allocated"),
        made.block(BASE + 2 * MIB, MIB, "active_allocated"),
        made.block(BASE + 3 * MIB, 512, "active_allocated"),
    ]
    found = profiles(made.snapshot(made.segment(*live), history=history.entries))
    assert found["Live bytes, device 0"] == {
        FORWARD: 2 * MIB,
        ("(no frames)", "note encoder.0"): MIB,
        ("(no frames)", "blocks of 256 B to 4.0 KiB"): 512,
    }


def test_a_note_explains_how_to_record_missing_stacks() -> None:
    only = made.snapshot(made.segment(made.block(BASE, MIB, "active_allocated")))
    (note,) = snapshot_graph(only, "x").notes
    assert "_record_memory_history()" in note


def test_a_note_counts_blocks_from_before_a_wrapped_history() -> None:
    history = made.History()
    history.free(BASE, 8 * MIB)
    history.alloc(BASE, 2 * MIB, frames=made.frames("main", "head"))
    snapshot = made.snapshot(history=history.entries)
    assert profiles(snapshot)["Live bytes at the peak of the history, device 0"] == {
        ("(allocated before the history begins)",): 8 * MIB
    }
    notes = snapshot_graph(snapshot, "x").notes
    assert "device 0: 1 blocks were allocated before its history begins" in notes


def test_devices_and_private_pools_stand_apart() -> None:
    live = [made.block(BASE, MIB, "active_allocated", frames=made.frames("main", "head"))]
    first = made.segment(*live, segment_pool_id=(0, 3), segment_type="small")
    found = profiles(made.snapshot(first, made.segment(*live, device=2)))
    assert ("private small pool 0.3", f"segment {BASE:#x}, 1.0 MiB", "[allocated]") in found[
        "Reserved bytes by segment, device 0"
    ]
    assert found["Live bytes, device 2"] == {HEAD: MIB}


def test_memlogs_own_export_shows_layers() -> None:
    model = torch.nn.Sequential(torch.nn.Linear(64, 64), torch.nn.ReLU(), torch.nn.Linear(64, 8))
    tracer = MemoryTracer()
    with tracer.trace(model):
        model(torch.ones(256, 64)).sum().backward()
    found = profiles(exporters.snapshot(tracer.recording))
    peak = found["Live bytes at the peak of the history, device 0"]
    assert sum(peak.values()) == pytest.approx(tracer.result.peak, rel=0.002)
    in_order = found["Bytes allocated, in order, device 0"]
    assert ("forward", "Sequential", "0") in in_order
    assert ("backward", "Sequential", "2") in in_order


def damaged(**changes: Any) -> dict[str, Any]:
    segment = made.segment(made.block(BASE, MIB, "active_allocated"))
    segment["blocks"][0].update(changes)
    return made.snapshot(segment)


@pytest.mark.parametrize(
    "snapshot",
    [
        damaged(size=-1),
        damaged(size="1"),
        damaged(size=1.5),
        damaged(size=1 << 4000),
        damaged(size=True),
        damaged(state=["x"]),
        damaged(address=None),
        {"segments": [3], "device_traces": []},
        {"segments": [{"blocks": 3}], "device_traces": []},
        {
            "segments": [made.segment(made.block(BASE, 1, "inactive"), device="x")],
            "device_traces": [],
        },
        {"segments": [], "device_traces": [7]},
        {"segments": [], "device_traces": [[{"action": "alloc"}]]},
        {"segments": [], "device_traces": [[{"action": "alloc", "addr": 1, "size": {}}]]},
        {"segments": [], "device_traces": {"a": 1}},
    ],
)
def test_a_snapshot_of_another_form_is_refused(snapshot: dict[str, Any]) -> None:
    with pytest.raises(SnapshotError, match=r"^s\.pickle is damaged") as caught:
        snapshot_graph(snapshot, "s.pickle")
    assert len(str(caught.value)) < 400


def test_an_empty_snapshot_is_refused() -> None:
    for empty in (made.snapshot(), {"segments": [], "device_traces": []}):
        with pytest.raises(SnapshotError, match="holds no allocation"):
            snapshot_graph(empty, "s.pickle")


def test_odd_frames_are_bounded_and_printable() -> None:
    odd: list[Any] = [
        {"name": "\x1b[31mred" + "x" * 10_000, "filename": "/" + "y" * 10_000, "line": "z"},
        {"name": 7},
        "no frame",
        *made.frames(*("deep",) * 5_000),
    ]
    live = [
        made.block(BASE + at, 512, "active_allocated", frames=odd) for at in range(0, 5120, 512)
    ]
    (stack,) = profiles(made.snapshot(made.segment(*live)))["Live bytes, device 0"]
    assert stack[0] == "(outer frames left out)"
    assert len(stack) == 201
    assert all(len(name) < 450 and name.isprintable() for name in stack)


def test_shared_lists_cannot_make_it_work_without_end() -> None:
    """A pickle of some kilobytes can name one list a million times."""
    one = made.segment(*[made.block(BASE, 512, "inactive")] * 3_000)
    with pytest.raises(SnapshotError, match="it uses one list in several places"):
        snapshot_graph(made.snapshot(*[one] * 3), "s.pickle")
    history = [{"action": "alloc", "size": 1, "addr": 1, "frames": []}]
    with pytest.raises(SnapshotError, match="it uses one list in several places"):
        snapshot_graph({"segments": [], "device_traces": [history, history]}, "s.pickle")
    with pytest.raises(SnapshotError, match="more than 5,000,000 entries"):
        snapshot_graph({"segments": [], "device_traces": [history * 5_000_001]}, "s.pickle")


@pytest.mark.parametrize(
    "shape", [["segment_type"], ["address"], ["blocks", 0, "state"], ["frames"]]
)
def test_text_is_made_of_no_list(shape: list[str | int]) -> None:
    """The text of 60 lists, each of which holds the one before it twice, has 2 to the 60 parts."""
    shared: list[Any] = []
    for _ in range(60):
        shared = [shared, shared]
    document = made.snapshot(made.segment(made.block(BASE, 512, "active_allocated")))
    where: Any = document["segments"][0]
    for key in shape[:-1]:
        where = where[key]
    where[shape[-1]] = shared
    with contextlib.suppress(SnapshotError):
        snapshot_graph(document, "s.pickle")

"""Snapshots of which most blocks and changes are read as columns."""

from __future__ import annotations

import gzip
import pickle
import random
import tracemalloc
from pathlib import Path
from typing import Any

import pytest
from support.device_snapshots import BASE, block, entry, segment, snapshot
from support.pickles import damaged, imported

from memlog import SnapshotError, UnsafeSnapshotError
from memlog.artifacts.snapshots import SnapshotUnpickler, draw_snapshot, read_snapshot
from memlog.trace.exporters import trace_plot
from memlog.trace.exporters.snapshots import Entries

FRAMES = [{"name": f"function_{n}", "filename": f"/src/{n}.py", "line": n} for n in range(300)]


def large(entries: int, seed: int = 0) -> dict[str, Any]:
    """Return a snapshot in which, as in torch's, each allocation has a list of the same frames of its own."""
    random_ = random.Random(seed)  # noqa: S311

    def stack() -> list[Any]:
        return random_.sample(FRAMES, random_.choice([0, 1, 2, 20]))

    sizes = [512, 4096, 3 << 20, 5 << 30]
    states = ["active_allocated", "inactive", "active_pending_free"]
    blocks = [
        block(BASE + (n << 33), random_.choice(sizes), random_.choice(states), frames=stack())
        for n in range(entries)
    ]
    history: list[dict[str, Any]] = []
    while len(history) < entries:
        at, size = random_.randrange(1 << 60), random_.choice(sizes)
        values = {"addr": at, "size": size, "frames": stack(), "pool_id": (0, len(history) % 3)}
        note = "x" * random_.randrange(280)
        history.append(entry("alloc", 7 * len(history), user_metadata=note, **values))
        if random_.random() < 0.8:
            history += [
                entry(action, 7 * len(history), **values)
                for action in ("free_requested", "free_completed")
            ]
    history += [
        entry("free_requested", 5, addr=blocks[0]["address"] + 1, size=7, frames=FRAMES[:3]),
        entry("oom", 6, size=1 << 31, device_free=3),
    ]
    half = len(blocks) // 2
    return snapshot(segment(*blocks[:half]), segment(*blocks[half:]), history=history)


@pytest.mark.parametrize("protocol", range(2, pickle.HIGHEST_PROTOCOL + 1))
def test_the_drawing_is_that_of_the_snapshot_as_dictionaries(tmp_path: Path, protocol: int) -> None:
    path = tmp_path / "s.pickle"
    path.write_bytes(pickle.dumps(large(1500, protocol), protocol))
    page = draw_snapshot(path, tmp_path / "s.html").read_text(encoding="utf-8")
    assert page == trace_plot(read_snapshot(path), "s.pickle")
    assert "function_" in page


def test_a_compressed_snapshot_is_drawn_the_same(tmp_path: Path) -> None:
    content = pickle.dumps(large(100))
    (tmp_path / "s.pickle").write_bytes(content)
    plain = draw_snapshot(tmp_path / "s.pickle", tmp_path / "a.html").read_text(encoding="utf-8")
    (tmp_path / "s.pickle").write_bytes(gzip.compress(content))
    packed = draw_snapshot(tmp_path / "s.pickle", tmp_path / "b.html").read_text(encoding="utf-8")
    assert packed == plain


def test_nearly_all_entries_are_columns() -> None:
    document = SnapshotUnpickler(pickle.dumps(large(3000))).load()
    lists = [*(each["blocks"] for each in document["segments"]), *document["device_traces"]]
    single = sum(type(each) is not Entries for entries in lists for each in entries)
    assert sum(len(each) for entries in lists for each in entries if type(each) is Entries) > 5000
    assert (
        single < 400
    )  # those with the first mention of a frame, and those at a frame of the pickle


def test_drawing_takes_little_more_memory_than_the_file(tmp_path: Path) -> None:
    path = tmp_path / "s.pickle"
    path.write_bytes(pickle.dumps(large(5000)))
    tracemalloc.start()
    try:
        draw_snapshot(path, tmp_path / "s.html")
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert peak < 5 * path.stat().st_size  # dictionaries take ten times


@pytest.mark.parametrize("key", ["addr", "size"])
@pytest.mark.parametrize("value", [-1, 1 << 64, "1", 1.5, None, True])
def test_a_wrong_number_is_one_clear_error(tmp_path: Path, key: str, value: object) -> None:
    document = large(80)
    changes = [each for each in document["device_traces"][0] if each["action"] == "alloc"]
    changes[10][key] = value
    (tmp_path / "s.pickle").write_bytes(pickle.dumps(document))
    with pytest.raises(SnapshotError, match=r"s\.pickle"):
        draw_snapshot(tmp_path / "s.pickle", tmp_path / "s.html")


def test_a_call_inside_an_entry_is_refused(tmp_path: Path) -> None:
    content = pickle.dumps(large(50))
    at = content.rindex(b"]\x94(")
    (tmp_path / "s.pickle").write_bytes(content[:at] + b"cthis\ns\n)R" + content[at:])
    with imported() as names, pytest.raises(UnsafeSnapshotError, match=r"this\.s"):
        draw_snapshot(tmp_path / "s.pickle", tmp_path / "s.html")
    assert names == []


@pytest.mark.parametrize("seed", range(60))
def test_a_damaged_snapshot_is_drawn_or_one_clear_error(tmp_path: Path, seed: int) -> None:
    (tmp_path / "s.pickle").write_bytes(damaged(pickle.dumps(large(50)), seed))
    try:
        draw_snapshot(tmp_path / "s.pickle", tmp_path / "s.html")
    except SnapshotError as error:
        assert "s.pickle" in str(error)  # noqa: PT017 - either is right

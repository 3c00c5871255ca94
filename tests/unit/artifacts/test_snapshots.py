"""Untrusted snapshots: read as data, never executed."""

from __future__ import annotations

import collections
import contextlib
import gzip
import os
import pickle
from pathlib import Path
from typing import Any

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from support.pickles import damaged, endless, imported, malicious

from memlog import SnapshotError, UnsafeSnapshotError
from memlog.artifacts import snapshots
from memlog.artifacts.snapshots import parse_snapshot, read_snapshot

PLAIN: dict[str, Any] = {
    "segments": [{"device": 0, "blocks": [{"size": 512, "state": "inactive"}], "pool": (0, 1)}],
    "device_traces": [[{"action": "alloc", "addr": 1 << 40, "size": 4, "stream": 0, "frames": []}]],
    "external_annotations": [],
    "ratio": 0.5,
    "on": True,
    "nothing": None,
}


SCALARS = (
    st.none()
    | st.booleans()
    | st.integers(-(2**64), 2**64)
    | st.floats(allow_nan=False)
    | st.text(max_size=300)
)
VALUES = st.recursive(
    SCALARS | st.tuples(SCALARS, SCALARS) | st.lists(SCALARS, max_size=4).map(tuple),
    lambda inner: st.lists(inner) | st.dictionaries(st.text() | st.integers(0, 9), inner),
)


class Evil:
    """An object whose pickle makes a folder when Python loads it."""

    def __init__(self, target: Path) -> None:
        self.target = target

    def __reduce__(self) -> Any:
        return os.mkdir, (str(self.target),)


@pytest.mark.parametrize("protocol", range(2, pickle.HIGHEST_PROTOCOL + 1))
def test_plain_snapshots_are_read(tmp_path: Path, protocol: int) -> None:
    path = tmp_path / "s.pickle"
    path.write_bytes(pickle.dumps(PLAIN, protocol))
    assert read_snapshot(path) == PLAIN


def test_a_list_of_segments_is_a_snapshot_too() -> None:
    assert parse_snapshot(pickle.dumps(PLAIN["segments"]))["segments"] == PLAIN["segments"]


@pytest.mark.parametrize("protocol", range(2, pickle.HIGHEST_PROTOCOL + 1))
def test_code_in_a_snapshot_never_runs(tmp_path: Path, protocol: int) -> None:
    target = tmp_path / "made by the attacker"
    content = pickle.dumps({**PLAIN, "x": Evil(target)}, protocol)
    with pytest.raises(UnsafeSnapshotError, match="mkdir"):
        parse_snapshot(content)
    assert not target.exists()
    pickle.loads(content)  # noqa: S301 - to show that the attack is a real one
    assert target.exists()


@pytest.mark.parametrize(
    "content",
    [
        b"cos\nsystem\n(S'true'\ntR.",  # GLOBAL and REDUCE
        b"(S'true'\nios\nsystem\n.",  # INST
        b"\x80\x04\x8c\x02os\x8c\x06system\x93\x8c\x04true\x85R.",  # STACK_GLOBAL
        b"\x80\x02cbuiltins\neval\nU\x031+1\x85R.",
        b"\x80\x02ccollections\nOrderedDict\n)R.",  # harmless, but no snapshot needs it
        b"Psomewhere\n.",  # a persistent id
        b"\x80\x02\x82\x01.",  # an extension's code
    ],
)
def test_every_way_to_import_is_refused(content: bytes) -> None:
    with pytest.raises((UnsafeSnapshotError, SnapshotError)):
        parse_snapshot(content)


def test_types_that_no_snapshot_holds_are_refused() -> None:
    for value in ({1, 2}, b"bytes", bytearray(b"x"), frozenset({1})):
        with pytest.raises(UnsafeSnapshotError):
            parse_snapshot(pickle.dumps({**PLAIN, "x": value}, 4))
    with pytest.raises(UnsafeSnapshotError, match="Counter"):
        parse_snapshot(pickle.dumps({**PLAIN, "x": collections.Counter()}))


@settings(max_examples=40)
@given(VALUES, st.integers(2, pickle.HIGHEST_PROTOCOL))
def test_plain_values_are_read_as_pickle_reads_them(value: Any, protocol: int) -> None:
    shared = [value, value, {"again": value}]
    read = snapshots.loads(pickle.dumps(shared, protocol))
    assert repr(read) == repr(shared)  # True is not 1, and 0.0 is not -0.0
    assert read[0] is read[1] or not isinstance(value, list | dict)


@pytest.mark.parametrize("content", [pytest.param(made, id=name) for name, made in endless()])
def test_what_python_would_work_on_without_end_is_refused(content: bytes) -> None:
    with pytest.raises(SnapshotError):
        parse_snapshot(content)


def test_it_takes_a_bounded_multiple_of_its_size() -> None:
    content = pickle.dumps({**PLAIN, "x": [{} for _ in range(100_000)]}, 4)
    with pytest.raises(UnsafeSnapshotError, match="more lists and dictionaries than its size"):
        parse_snapshot(content)


def test_what_holds_itself_is_read_and_ends() -> None:
    loop: dict[str, Any] = dict(PLAIN)
    loop["self"] = loop
    assert parse_snapshot(pickle.dumps(loop))["self"]["segments"] == PLAIN["segments"]


@pytest.mark.parametrize(
    "content", [b"", b"not a pickle", pickle.dumps(3), pickle.dumps({"segments": 1}), b"\x80\x04}"]
)
def test_what_is_no_snapshot_is_one_clear_error(tmp_path: Path, content: bytes) -> None:
    path = tmp_path / "other.pickle"
    path.write_bytes(content)
    with pytest.raises(SnapshotError, match=r"other\.pickle"):
        read_snapshot(path)


def test_a_snapshot_has_a_size_limit(tmp_path: Path) -> None:
    path = tmp_path / "large.pickle"
    path.write_bytes(pickle.dumps(PLAIN))
    with pytest.raises(SnapshotError, match="larger than 10 bytes"):
        read_snapshot(path, max_bytes=10)


def test_a_gzipped_snapshot_is_read_up_to_the_limit(tmp_path: Path) -> None:
    path = tmp_path / "s.pickle.gz"
    packed = gzip.compress(pickle.dumps(PLAIN))
    path.write_bytes(packed)
    assert read_snapshot(path)["segments"] == PLAIN["segments"]
    path.write_bytes(gzip.compress(bytes(10_000_000)))
    with pytest.raises(SnapshotError, match="larger than 1,000,000 bytes"):
        read_snapshot(path, max_bytes=1_000_000)
    path.write_bytes(packed[:-12])
    with pytest.raises(SnapshotError, match=r"s\.pickle\.gz is damaged"):
        read_snapshot(path)


def test_a_missing_file_is_one_clear_error(tmp_path: Path) -> None:
    with pytest.raises(SnapshotError, match="can't be read"):
        read_snapshot(tmp_path / "nowhere.pickle")


@given(st.integers(0, 2**32))
def test_no_malicious_pickle_imports_anything(seed: int) -> None:
    content = malicious(pickle.dumps(PLAIN, seed % (pickle.HIGHEST_PROTOCOL + 1)), seed)
    with imported() as names, pytest.raises((UnsafeSnapshotError, SnapshotError)):
        parse_snapshot(content)
    assert names == []


@given(st.integers(0, 2**32))
def test_a_damaged_pickle_is_read_or_one_clear_error(seed: int) -> None:
    content = damaged(pickle.dumps(PLAIN, seed % (pickle.HIGHEST_PROTOCOL + 1)), seed)
    with imported() as names, contextlib.suppress(SnapshotError):
        parse_snapshot(content)
    assert names == []


@given(st.binary(max_size=40))
@example(b"\x80\x04]r\xff\xff\xff\x7f.")  # a memo of 32 GiB
@example(b"]p2147483647\n.")
@example(b"]p-1\n.")
@example(b"\x80\x04\x8d\xff\xff\xff\xff\xff\x00\x00\x00.")  # text of a terabyte
def test_what_asks_for_more_than_it_has_is_refused_before_it_gets_it(content: bytes) -> None:
    with pytest.raises((UnsafeSnapshotError, SnapshotError)):
        parse_snapshot(content)

"""Speedscope files: recognised by content, refused if the page would break."""

import contextlib
import gzip
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from support.flamegraphs import SCHEMA, document, evented, sampled

from memlog.artifacts import snapshots
from memlog.artifacts.server import check_flamegraph, is_flamegraph, is_openable
from memlog.artifacts.snapshots import read_content
from memlog.errors import UnopenableFileError


def encoded(value: Any) -> bytes:
    return json.dumps(value).encode()


def changed(change: Callable[[dict[str, Any]], object], *profiles: dict[str, Any]) -> bytes:
    made = document(*profiles)
    change(made)
    return encoded(made)


def test_a_file_is_recognised_by_its_schema_whatever_its_name(tmp_path: Path) -> None:
    for name, content in {
        "a.bin": encoded(document()),
        "b": gzip.compress(encoded(document())),
        "c.txt": b'{"padding": "' + b"x" * 100_000 + b'", ' + encoded(document())[1:],
        "d": encoded(document()).replace(b"/", rb"\/"),
    }.items():
        (tmp_path / name).write_bytes(content)
        assert is_openable(tmp_path / name), name


@pytest.mark.parametrize(
    "content",
    [
        b"",
        b"{}",
        b"[]",
        b"null",
        b"[" * 100_000,
        b'{"a":' * 100_000,
        b'{"$schema": 1}',
        b'{"$schema": "https://elsewhere.example/schema.json"}',
        f"see {SCHEMA}".encode(),
        encoded({"note": SCHEMA}),
        b"\x80\x04K\x01.",
        b"\xff\xfe\x00",
    ],
)
def test_other_files_are_no_flame_graphs(content: bytes, tmp_path: Path) -> None:
    assert not is_flamegraph(content)
    (tmp_path / "x.speedscope.json").write_bytes(content)
    assert not is_openable(tmp_path / "x.speedscope.json")


def test_a_damaged_one_is_recognised_and_refused() -> None:
    torn = encoded(document())[:-20]
    assert is_flamegraph(torn)
    with pytest.raises(UnopenableFileError, match="damaged"):
        check_flamegraph(torn)


def setting(key: str, value: object) -> Callable[[dict[str, Any]], object]:
    """Return a change that sets a field of the first profile."""
    return lambda made: made["profiles"][0].update({key: value})


BREAKING = {
    "no profile": (lambda made: made.update(profiles=[]), "it has no profile"),
    "active profile": (lambda made: made.update(activeProfileIndex=2), "selects profile 2"),
    "no frames": (lambda made: made.pop("shared"), "missing required field `shared`"),
    "frame without a name": (lambda made: made["shared"]["frames"].append({}), "field `name`"),
    "negative weight": (setting("weights", [1, -1, 2]), ">= 0"),
    "weight of text": (setting("weights", ["1", 1, 2]), "Expected `float`"),
    "fewer weights": (setting("weights", [1, 2]), "3 samples and 2 weights"),
    "frame out of range": (setting("samples", [[0], [5], [1]]), "names frame 5"),
    "negative frame": (setting("samples", [[0], [-1], [1]]), ">= 0"),
    "huge frame": (setting("samples", [[0], [10**30], [1]]), r"out of range|frame 1,000"),
    "unit": (setting("unit", "MiB"), "Invalid enum value 'MiB'"),
    "type": (setting("type", "other"), "Invalid value 'other'"),
    "ends early": (setting("endValue", -1), "before it begins"),
    "infinite": (setting("endValue", float("inf")), "damaged"),
    "not a number": (setting("startValue", float("nan")), "damaged"),
}


@pytest.mark.parametrize("case", BREAKING)
def test_what_breaks_the_page_is_refused(case: str) -> None:
    change, message = BREAKING[case]
    with pytest.raises(UnopenableFileError, match=message):
        check_flamegraph(changed(change))


def opening(frame: int, at: float) -> dict[str, Any]:
    return {"type": "O", "frame": frame, "at": at}


def closing(frame: int, at: float) -> dict[str, Any]:
    return {"type": "C", "frame": frame, "at": at}


@pytest.mark.parametrize(
    ("events", "message"),
    [
        ([opening(0, 0)], "1 frames are never closed"),
        ([closing(0, 0)], "not the innermost"),
        ([opening(0, 0), opening(1, 1), closing(0, 2), closing(1, 3)], "not the innermost"),
        ([opening(0, 5), closing(0, 4)], "goes back in time"),
        ([opening(9, 0), closing(9, 1)], "names frame 9"),
        ([{"type": "X", "frame": 0, "at": 0}], "damaged"),
    ],
)
def test_events_that_break_the_page_are_refused(events: list[object], message: str) -> None:
    with pytest.raises(UnopenableFileError, match=message):
        check_flamegraph(changed(setting("events", events), evented()))


@given(st.recursive(st.none() | st.integers() | st.text() | st.floats(), st.lists))
@pytest.mark.slow
def test_whatever_stands_in_a_profile_it_is_shown_or_refused(value: object) -> None:
    for key in sampled():
        with contextlib.suppress(UnopenableFileError):
            check_flamegraph(changed(setting(key, value)))


@given(st.binary(max_size=200), st.integers(0, 400))
def test_garbage_in_the_middle_never_raises_anything_else(garbage: bytes, place: int) -> None:
    content = encoded(document())
    with contextlib.suppress(UnopenableFileError):
        check_flamegraph(content[:place] + garbage + content[place:])


def test_a_bomb_is_not_unpacked(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(snapshots, "MAX_BYTES", 10_000)
    (tmp_path / "bomb").write_bytes(gzip.compress(b" " * 100_000))
    with pytest.raises(UnopenableFileError, match="larger than"):
        read_content(tmp_path / "bomb")


def test_torn_gzip_and_what_is_no_file_are_one_clear_error(tmp_path: Path) -> None:
    (tmp_path / "torn").write_bytes(gzip.compress(encoded(document()))[:-30])
    with pytest.raises(UnopenableFileError, match="damaged"):
        read_content(tmp_path / "torn")
    for path in (tmp_path, Path("/dev/zero")):
        with pytest.raises(UnopenableFileError, match="is no file"):
            read_content(path)


def test_a_pickle_may_be_larger_than_what_the_page_is_given(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(snapshots, "MAX_BYTES", 100)
    monkeypatch.setattr(snapshots, "MAX_PICKLE", 1_000)
    for text, limit in ((b"{", 100), (b"\x80", 1_000)):
        for pack in (bytes, gzip.compress):
            (tmp_path / "file").write_bytes(pack(text * limit))
            assert len(read_content(tmp_path / "file")) == limit
            (tmp_path / "file").write_bytes(pack(text * (limit + 1)))
            with pytest.raises(UnopenableFileError, match="larger than"):
                read_content(tmp_path / "file")

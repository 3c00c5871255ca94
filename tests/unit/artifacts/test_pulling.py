"""Downloading files from an untrusted store into one folder and nowhere else."""

import os
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from support.stores import DictStore, stored

from memlog.artifacts.pulling import (
    MAX_FILE_BYTES,
    MAX_FILES,
    Pulled,
    Puller,
    choose,
    is_safe,
    numbered,
)
from memlog.errors import ArtifactError
from memlog.sink import StoredArtifact


def pulled(store: DictStore, folder: Path, *, force: bool = False) -> list[Pulled]:
    puller = Puller(store, "run", folder, force=force)
    choice = choose(store.list_artifacts("run"), None)
    puller.room_for(choice.size)
    arrived: list[int] = []
    return [puller.pull(artifact, arrived.append) for artifact in choice.files]


def contents(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in folder.iterdir()}


def test_files_arrive_and_nothing_else_is_left(tmp_path: Path) -> None:
    folder = tmp_path / "new" / "folder"
    files = pulled(DictStore({"a.json": b"one", "b": b""}), folder)
    assert contents(folder) == {"a.json": b"one", "b": b""}
    assert [(file.path.name, file.size, file.outcome) for file in files] == [
        ("a.json", 3, "written"),
        ("b", 0, "written"),
    ]


def test_pull_keeps_existing_files_and_recognises_the_same_one(tmp_path: Path) -> None:
    (tmp_path / "a.b.json").write_bytes(b"mine")
    store = DictStore({"a.b.json": b"other"})
    assert [file.path.name for file in pulled(store, tmp_path)] == ["a-1.b.json"]
    [again] = pulled(store, tmp_path)
    assert (again.path.name, again.outcome) == ("a-1.b.json", "same")
    assert contents(tmp_path) == {"a.b.json": b"mine", "a-1.b.json": b"other"}


def test_force_replaces_files_and_not_what_a_link_points_at(tmp_path: Path) -> None:
    folder = tmp_path / "folder"
    folder.mkdir()
    (tmp_path / "precious").write_bytes(b"mine")
    (folder / "link").symlink_to(tmp_path / "precious")
    (folder / "file").write_bytes(b"old")
    files = pulled(DictStore({"link": b"new", "file": b"new"}), folder, force=True)
    assert [file.outcome for file in files] == ["replaced", "replaced"]
    assert contents(folder) == {"link": b"new", "file": b"new"}
    assert (tmp_path / "precious").read_bytes() == b"mine"
    (folder / "folder").mkdir()
    with pytest.raises(ArtifactError, match="is a folder"):
        pulled(DictStore({"folder": b""}), folder, force=True)


def test_a_link_that_is_there_is_not_followed(tmp_path: Path) -> None:
    folder = tmp_path / "folder"
    folder.mkdir()
    (folder / "a").symlink_to(tmp_path / "outside")
    (folder / "b").symlink_to(tmp_path / "same")
    (tmp_path / "same").write_bytes(b"two")
    files = pulled(DictStore({"a": b"one", "b": b"two"}), folder)
    assert [file.path.name for file in files] == ["a-1", "b-1"]
    assert not (tmp_path / "outside").exists()


def test_two_files_of_one_name_both_arrive(tmp_path: Path) -> None:
    for force in (False, True):
        listed = [stored("x", "a"), stored("x", "b"), stored("x", "b")]
        files = pulled(DictStore({"x": b"1"}, listed), tmp_path / str(force), force=force)
        assert [file.path.name for file in files] == ["x", "x-1"]


UNSAFE = [
    *("", ".", "..", "../x", "a/b", "/etc/passwd", "a\\b", "C:x", ".hidden", "a b"),
    *("x" * 129, "é", "a\0b", "a\nb", "\x1b[2J"),
]


@pytest.mark.parametrize("name", UNSAFE)
def test_unsafe_names_are_left_out(name: str) -> None:
    choice = choose([stored(name), stored("good"), stored("good", kind=name)], None)
    assert [(file.name, file.kind) for file in choice.files] == [("good", "file")]
    assert choice.refused == [name, "good"]


@pytest.mark.parametrize("name", ["x", "a.b.json", "-x", "_", "x.", "a..b"])
def test_safe_names_pass(name: str) -> None:
    assert is_safe(name)


@given(st.text())
def test_a_safe_name_is_one_part_of_a_path(name: str) -> None:
    if is_safe(name):
        assert Path("folder", name).parent == Path("folder")
        assert os.path.basename(name) == name  # noqa: PTH119 - an independent way


PARTS = st.sampled_from(["..", ".", "/", "\\", "a", "\0", "\n", "C:", " ", "-", ".json", "é"])
NAMES = st.text(max_size=140) | st.lists(PARTS, max_size=6).map("".join)
FILES = st.builds(StoredArtifact, NAMES, NAMES, st.none() | st.integers(-(2**70), 2**70))


@given(st.lists(FILES, max_size=8), st.booleans())
def test_whatever_a_store_tells_nothing_is_written_elsewhere(
    tmp_path_factory: pytest.TempPathFactory, listed: list[StoredArtifact], force: bool
) -> None:
    root = tmp_path_factory.mktemp("pull")
    folder = root / "deep" / "folder"

    def bring(path: Path) -> Path:
        path.parent.mkdir(parents=True, exist_ok=True)  # as a client does that trusts its server
        path.write_bytes(b"content")
        return path

    with suppress(ArtifactError):
        pulled(DictStore({}, listed, bring), folder, force=force)
    assert {path.name for path in root.iterdir()} <= {"deep"}
    assert {path.name for path in root.glob("deep/*")} <= {"folder"}
    assert all(path.is_file() and is_safe(path.name) for path in folder.glob("*"))


def test_numbers_go_before_the_endings() -> None:
    names = numbered("a.speedscope.json")
    assert [next(names) for _ in range(3)] == [
        *("a.speedscope.json", "a-1.speedscope.json", "a-2.speedscope.json"),
    ]


def test_too_many_and_too_large_are_refused_before_anything_is_fetched() -> None:
    with pytest.raises(ArtifactError, match=r"10,000 files.*--kind"):
        choose([stored(f"x{number}") for number in range(10_000)], None)
    with pytest.raises(ArtifactError, match=r"'x' has 8\.0 GiB"):
        choose([stored("x", size=MAX_FILE_BYTES + 1)], None)
    assert (
        len(choose([stored(f"x{number}") for number in range(MAX_FILES)], None).files) == MAX_FILES
    )


def test_what_does_not_fit_on_the_disk_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ArtifactError, match="has room for"):
        Puller(DictStore({}), "run", tmp_path).room_for(2**62)


def test_a_kind_is_chosen() -> None:
    listed = [stored("a", "flamegraph"), stored("b", "snapshot")]
    assert [file.name for file in choose(listed, "snapshot").files] == ["b"]


def a_link(path: Path) -> Path:
    path.symlink_to("/etc/passwd")
    return path


def a_folder(path: Path) -> Path:
    path.mkdir()
    return path


def elsewhere(path: Path) -> Path:
    return Path("/etc", path.name)


@pytest.mark.parametrize("bring", [a_link, a_folder, elsewhere])
def test_what_is_no_file_of_the_folder_is_not_kept(
    bring: Callable[[Path], Path], tmp_path: Path
) -> None:
    with pytest.raises(ArtifactError, match="no plain file"):
        pulled(DictStore({"passwd": b""}, bring=bring), tmp_path)
    assert contents(tmp_path) == {}


def too_much(path: Path) -> Path:
    """Write without reporting progress, as some clients do."""
    with path.open("wb") as file:
        file.truncate(2 * 64 * 1024**2)
    return path


def test_a_file_that_does_not_end_is_cut_off(tmp_path: Path) -> None:
    large = DictStore({"x": bytes(64 * 1024**2 + 2)}, [stored("x", size=1)])
    with pytest.raises(ArtifactError, match="larger than the tracker lists"):
        pulled(large, tmp_path)
    with pytest.raises(OSError, match="large"):  # by the system, without the client's help
        pulled(DictStore({}, [stored("x", size=1)], bring=too_much), tmp_path)
    assert contents(tmp_path) == {}

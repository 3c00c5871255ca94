"""Files below a folder are read and written without following links."""

import os
from pathlib import Path

import pytest

from memlog._internal.safe_files import beside, open_plain, open_to_append, read_plain, replacing


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Folder that is reached through a link, as a user's folder can be."""
    (tmp_path / "real").mkdir()
    (tmp_path / "link").symlink_to("real")
    return tmp_path / "link"


@pytest.fixture
def victim(tmp_path: Path) -> Path:
    path = tmp_path / "victim"
    path.write_text("precious")
    return path


def write(folder: Path, name: str, content: bytes) -> None:
    with replacing(folder, name) as file:
        file.write(content)


def test_a_file_is_written_whole_and_read_back(folder: Path) -> None:
    write(folder, "a/b", b"one")
    write(folder, "a/b", b"two")
    assert read_plain(folder, "a/b", 3) == b"two"
    assert [path.name for path in folder.rglob("*")] == ["a", "b"]
    with pytest.raises(OSError, match="larger than 2 bytes"):
        read_plain(folder, "a/b", 2)


def test_a_failed_write_leaves_the_old_file(folder: Path) -> None:
    write(folder, "b", b"one")
    with pytest.raises(TypeError), replacing(folder, "b") as file:
        file.write("two")  # type: ignore[arg-type]  # which is the failure
    assert [(path.name, path.read_bytes()) for path in folder.iterdir()] == [("b", b"one")]


def test_it_has_the_permissions_of_any_new_file(folder: Path) -> None:
    write(folder, "b", b"")
    (folder / "usual").touch()
    assert (folder / "b").stat().st_mode == (folder / "usual").stat().st_mode


def test_a_link_is_replaced_and_never_written_through(folder: Path, victim: Path) -> None:
    (folder / "b").symlink_to(victim)
    with pytest.raises(OSError, match="it is a link"):
        open_to_append(folder, "b")
    with pytest.raises(OSError, match="it is a link"):
        open_plain(folder, "b")
    write(folder, "b", b"mine")
    assert victim.read_text() == "precious"
    assert not (folder / "b").is_symlink()


def test_a_folder_that_is_a_link_is_left_alone(folder: Path, tmp_path: Path) -> None:
    outside = tmp_path / "outside"
    outside.mkdir()
    (outside / "b").write_text("precious")
    (folder / "a").symlink_to(outside)
    for name in ("a/b", "a/c/d"):
        with pytest.raises(OSError, match="it is a link"):
            write(folder, name, b"")
        with pytest.raises(OSError, match="it is a link"):
            open_plain(folder, name)
        with pytest.raises(OSError, match="it is a link"):
            open_to_append(folder, name)
    assert [(path.name, path.read_text()) for path in outside.iterdir()] == [("b", "precious")]


@pytest.mark.parametrize(
    "name", ["", ".", "..", "../victim", "a/../../victim", "/etc/passwd", "a\0"]
)
def test_a_name_that_leads_out_of_the_folder_is_refused(folder: Path, name: str) -> None:
    with pytest.raises(ValueError, match="leads out of"):
        open_plain(folder, name)
    with pytest.raises(ValueError, match="leads out of"):
        write(folder, name, b"")


def test_what_is_no_plain_file_is_not_waited_for(folder: Path) -> None:
    os.mkfifo(folder / "pipe")
    (folder / "folder").mkdir()
    for name in ("pipe", "folder"):
        with pytest.raises(OSError, match="is not a regular file"):
            open_plain(folder, name)
    with pytest.raises(OSError, match="pipe"):
        open_to_append(folder, "pipe")


def test_a_temporary_file_is_removed(folder: Path) -> None:
    with beside(folder / "b") as (file, path):
        file.write(b"x")
        assert path.parent == folder
        assert path.exists()
    assert list(folder.iterdir()) == []

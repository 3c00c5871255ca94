"""Files that are kept in a run's folder."""

import os
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from memlog.journal import RunDirectory, new_run
from memlog.journal.artifacts import MAX_NAME, keep, safe_name


@pytest.fixture
def run(tmp_path: Path) -> RunDirectory:
    return new_run(tmp_path / "runs")


def test_a_copy_is_kept(run: RunDirectory, tmp_path: Path) -> None:
    source = tmp_path / "flame graph.json"
    source.write_text("{}")
    artifact = keep(run, source, None, "flame graph")
    source.unlink()
    assert (artifact.name, artifact.kind, artifact.size) == ("flame_graph.json", "flame_graph", 2)
    assert (run.path / artifact.path).read_text() == "{}"
    assert [path.name for path in run.artifacts.iterdir()] == ["flame_graph.json"]


@pytest.mark.parametrize(
    ("source", "why"),
    [
        ("nothing-here", "there is no such file; write it before"),
        (".", "it is a folder: pass an archive of it"),
        ("/dev/zero", "it is a device, a pipe or a socket: write its data to a file"),
        ("fifo", "it is a device, a pipe or a socket: write its data to a file"),
    ],
)
def test_no_file_is_an_error(run: RunDirectory, tmp_path: Path, source: str, why: str) -> None:
    os.mkfifo(tmp_path / "fifo")
    with pytest.raises(ValueError, match=why):
        keep(run, tmp_path / source, "name", "kind")
    assert not run.artifacts.exists()


def test_a_copy_that_fails_leaves_nothing(run: RunDirectory, tmp_path: Path) -> None:
    source = tmp_path / "source"
    source.write_text("x")
    (run.artifacts / "name").mkdir(parents=True)  # a folder stands where the file is to go
    with pytest.raises(OSError, match="name"):
        keep(run, source, "name", "kind")
    assert [path.name for path in run.artifacts.iterdir()] == ["name"]


@pytest.mark.parametrize(
    ("text", "safe"),
    [
        ("a.json", "a.json"),
        ("../../etc/passwd", "_.._etc_passwd"),
        (".hidden", "hidden"),
        ("Größe µ", "Gr__e__"),
        ("x" * 200 + ".speedscope.json", "x" * 123 + ".json"),
    ],
)
def test_names_are_made_safe(text: str, safe: str) -> None:
    assert safe_name(text) == safe


@given(st.text())
def test_a_name_is_safe_or_refused(text: str) -> None:
    try:
        safe = safe_name(text)
    except ValueError:
        return
    assert 1 <= len(safe) <= MAX_NAME
    assert not safe.startswith(".")
    assert set(safe) <= set("abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ0123456789._-")

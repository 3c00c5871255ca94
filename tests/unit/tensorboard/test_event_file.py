"""memlog's own event file. If it was cut off anywhere, it is completed without duplicates."""

import subprocess
import sys
from pathlib import Path

import pytest
from support.event_files import events_in
from tensorboard.compat.proto.summary_pb2 import Summary

from memlog.errors import RunRefusedError, TrackerRejectedError, TrackerUnavailableError
from memlog.sink import Connection, JoinableBackend, Target, TrackerRun
from memlog.testing.made import points
from memlog_tensorboard import backend
from memlog_tensorboard.event_file import EventFile, Scalar

NAME = "events.out.tfevents.0000000000.0000000000.memlog-r"


def entries(count: int) -> list[Scalar]:
    return [
        Scalar(step, 1e9 + step, Summary.Value(tag="m", simple_value=step)) for step in range(count)
    ]


def steps_in(folder: Path) -> list[int]:
    return [event.step for event in events_in(folder).Scalars("m")]


def test_cut_off_anywhere_it_is_completed(tmp_path: Path) -> None:
    whole = tmp_path / "whole" / NAME
    whole.parent.mkdir()
    EventFile(whole).append(entries(4))
    content = whole.read_bytes()
    for length in range(len(content)):
        cut = tmp_path / str(length) / NAME
        cut.parent.mkdir()
        cut.write_bytes(content[:length])
        EventFile(cut).append(entries(6))
        assert steps_in(cut.parent) == list(range(6))


def test_a_damaged_record_and_what_follows_are_written_again(tmp_path: Path) -> None:
    path = tmp_path / NAME
    EventFile(path).append(entries(4))
    content = bytearray(path.read_bytes())
    content[-20] ^= 1
    path.write_bytes(content)
    EventFile(path).append(entries(4))
    assert steps_in(tmp_path) == list(range(4))


def test_one_object_and_another_store_a_value_once(tmp_path: Path) -> None:
    first, second = EventFile(tmp_path / NAME), EventFile(tmp_path / NAME)
    for file in (first, second, first):
        file.append(entries(3) + entries(5))
    assert steps_in(tmp_path) == list(range(5))


def test_a_file_that_was_deleted_begins_anew(tmp_path: Path) -> None:
    file = EventFile(tmp_path / NAME)
    file.append(entries(2))
    (tmp_path / NAME).unlink()
    file.append(entries(3))
    assert steps_in(tmp_path) == [0, 1, 2]


def test_a_full_disk_is_reported_and_costs_nothing(tmp_path: Path) -> None:
    """A size limit on this process's files stands for a full disk."""
    code = """
import resource, signal, sys
from pathlib import Path
sys.path[:0] = sys.argv[2:]
from memlog.errors import TrackerUnavailableError
from memlog.sink import Target, TrackerRun
from memlog.testing.made import points
from memlog_tensorboard import backend
signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
sink = backend.open_sink(Target("r", TrackerRun(sys.argv[1])))
resource.setrlimit(resource.RLIMIT_FSIZE, (700, resource.RLIM_INFINITY))
try:
    sink.log_points(points(50))
except TrackerUnavailableError as error:
    print(error)
resource.setrlimit(resource.RLIMIT_FSIZE, (resource.RLIM_INFINITY, resource.RLIM_INFINITY))
sink.log_points(points(50))
print(sorted(name for name in ("torch", "tensorflow") if name in sys.modules))
"""
    done = subprocess.run(
        [sys.executable, "-c", code, str(tmp_path)],
        capture_output=True,
        text=True,
        timeout=60,
        check=True,
    )
    message, heavy = done.stdout.splitlines()
    assert "can't be written (File too large)" in message
    assert heavy == "[]"
    scalars = events_in(tmp_path).Scalars("memory/host/rss_mib")
    assert [event.step for event in scalars] == list(range(50))


def test_a_link_is_not_followed(tmp_path: Path) -> None:
    (tmp_path / "other").write_bytes(b"")
    (tmp_path / NAME).symlink_to(tmp_path / "other")
    sink = backend.open_sink(Target("r", TrackerRun(str(tmp_path))))
    with pytest.raises(TrackerUnavailableError):
        sink.log_points(points(1))
    assert (tmp_path / "other").read_bytes() == b""


def test_a_deleted_folder_keeps_only_its_own_data_waiting(tmp_path: Path) -> None:
    sink = backend.open_sink(Target("r", TrackerRun(str(tmp_path / "gone"))))
    with pytest.raises(RunRefusedError, match="is deleted"):
        sink.log_points(points(1))


def test_a_run_of_its_own_has_a_folder_of_its_own(tmp_path: Path) -> None:
    connection = Connection(str(tmp_path / "runs"))
    known = [
        Target("r", None, connection=connection),
        Target("r", None, project="a/../b", name="x/y", connection=connection),
        Target("r", None, beside=TrackerRun("/logs"), connection=connection),
    ]
    folders = [Path(backend.open_sink(target).open().run_id) for target in known]
    assert [str(folder.relative_to(tmp_path / "runs")) for folder in folders] == [
        "memlog-r",
        "a_.._b/x_y-r",
        folders[2].name,
    ]
    assert folders[2].name.startswith("memlog-r-")
    assert [Path(backend.open_sink(target).open().run_id) for target in known] == folders


def test_the_backend_has_no_files_and_joins_folders(monkeypatch: pytest.MonkeyPatch) -> None:
    assert isinstance(backend, JoinableBackend)
    assert backend.run_of("s3://bucket/run", None, None) is None
    run = backend.run_of("logs/a b", None, None)
    assert run is not None
    assert run.run_id == str(Path("logs/a b").absolute())
    assert run.link == f"tensorboard --logdir '{run.run_id}'"
    with pytest.raises(TrackerRejectedError, match="leave out --backend"):
        backend.open_store(Connection())
    monkeypatch.setenv("TENSORBOARD_LOGGING_DIR", "here")
    assert backend.connection().uri == str(Path("here").absolute())

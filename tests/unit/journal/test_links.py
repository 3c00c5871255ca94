"""Links in a run's folder: memlog reads and writes nothing through them."""

import os
from pathlib import Path

import pytest
from click.testing import CliRunner
from support import thirdparty
from support.journals import MIB, MadeRun, at, batch
from support.sinks import ListSink, ListTracker
from support.thirdparty import ListBackend

from memlog.cli.main import cli
from memlog.delivery.uploader.uploader import Uploader
from memlog.events import Artifact, End, Run
from memlog.journal import RunDirectory
from memlog.journal.artifacts import keep
from memlog.sink import Target
from memlog.trace.exporters import write_json


@pytest.fixture
def outside(tmp_path: Path) -> Path:
    """A folder of the user's files."""
    folder = tmp_path / "outside"
    folder.mkdir()
    for name in ("id_rsa", "lock", "state", "summary", "ride", "log"):
        (folder / name).write_text("precious")
    return folder


@pytest.fixture
def backend(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> ListBackend:
    return thirdparty.install(tmp_path / "site", monkeypatch)


def made_run(root: Path, *, ended: bool = True) -> RunDirectory:
    made = MadeRun(root).write(Run(at(0), None, None, ("list",), {}), batch(0, MIB))
    made.write(Artifact(at(1), "id_rsa", "file", "artifacts/id_rsa", 8))
    if ended:
        made.write(End(at(3), "finished"))
    return made.closed()


def sync(root: Path, run: RunDirectory) -> str:
    arguments = ["sync", run.id, "--dir", str(root), "--timeout", "0"]
    result = CliRunner().invoke(cli, arguments, prog_name="memlog")
    assert "Traceback" not in result.output
    return result.stderr


def untouched(outside: Path) -> None:
    assert {path.read_text() for path in outside.iterdir()} == {"precious"}
    assert len(list(outside.iterdir())) == 6


def test_what_memlog_writes_for_itself_goes_through_none(
    tmp_path: Path, outside: Path, backend: ListBackend
) -> None:
    run = made_run(tmp_path / "runs")
    for name, victim in {
        "delivery/list.json": "state",
        "delivery/list.tmp": "state",
        "delivery/list.ride": "ride",
        "delivery/list.ride-tmp": "ride",
        "summary.json": "summary",
        "summary.tmp": "summary",
    }.items():
        (run.path / name).symlink_to(outside / victim)
    assert sync(tmp_path / "runs", run) == ""
    assert len(backend.tracker.all_points()) == 2
    untouched(outside)


def test_a_lock_that_is_a_link_is_reported(
    tmp_path: Path, outside: Path, backend: ListBackend
) -> None:
    run = made_run(tmp_path / "runs")
    (run.delivery / "list.lock").symlink_to(outside / "lock")
    assert "list.lock: it is a link" in sync(tmp_path / "runs", run)
    untouched(outside)


@pytest.mark.parametrize("ended", [True, False])
def test_a_folder_of_artifacts_elsewhere_is_neither_sent_nor_written(
    tmp_path: Path, outside: Path, backend: ListBackend, ended: bool
) -> None:
    """If the run has no end event, `memlog sync` would write a report there."""
    run = made_run(tmp_path / "runs", ended=ended)
    run.artifacts.symlink_to(outside)
    sync(tmp_path / "runs", run)
    assert backend.tracker.all_points()
    assert backend.tracker.files == {}
    untouched(outside)
    with pytest.raises(OSError, match="it is a link"):
        keep(run, outside / "id_rsa", "another", "file")


class SwappingSink(ListSink):
    """Sink during whose upload the file is replaced by a link."""

    def log_artifact(self, artifact: Artifact, file: Path) -> None:
        assert file.name == "graph"
        assert not file.is_relative_to(self.run.path)
        (self.run.artifacts / "graph").unlink()
        (self.run.artifacts / "graph").symlink_to(self.secret)
        super().log_artifact(artifact, file)
        self.handed.append(file)

    run: RunDirectory
    secret: Path
    handed: list[Path]


def kept_file(tmp_path: Path) -> RunDirectory:
    made = MadeRun(tmp_path / "runs")
    (tmp_path / "graph").write_text("content")
    graph = keep(made.directory, tmp_path / "graph", None, "file")
    return made.write(batch(0, MIB), graph).closed()


def test_a_file_swapped_for_a_link_is_sent_as_it_was(tmp_path: Path, outside: Path) -> None:
    run, tracker, handed = kept_file(tmp_path), ListTracker(), list[Path]()

    def open_sink(target: Target) -> ListSink:
        sink = SwappingSink(tracker, target)
        sink.run, sink.secret, sink.handed = run, outside / "id_rsa", handed
        return sink

    Uploader(run, "list", open_sink, may_open_own=True).deliver(complete=True)
    assert list(tracker.files.values()) == [{("file", "graph"): b"content"}]
    [copy] = handed
    assert not copy.parent.exists()


def test_a_client_that_reads_files_later_gets_the_runs_own(tmp_path: Path) -> None:
    run, given = kept_file(tmp_path), list[Path]()

    class LaterSink(ListSink):
        keeps_files = True

        def log_artifact(self, artifact: Artifact, file: Path) -> None:
            given.append(file)
            super().log_artifact(artifact, file)

    tracker = ListTracker()
    Uploader(run, "list", lambda t: LaterSink(tracker, t), may_open_own=True).deliver(complete=True)
    assert given == [run.artifacts / "graph"]


def test_a_runs_folder_that_the_user_reaches_through_a_link_works(
    tmp_path: Path, backend: ListBackend
) -> None:
    (tmp_path / "disk").mkdir()
    (tmp_path / "runs").symlink_to("disk")
    run = made_run(tmp_path / "runs")
    (tmp_path / "id_rsa").write_text("a file that was kept")
    keep(run, tmp_path / "id_rsa", None, "file")
    assert sync(tmp_path / "runs", run) == ""
    assert list(backend.tracker.files.values()) == [{("file", "id_rsa"): b"a file that was kept"}]


def test_an_export_is_written_through_no_link_that_was_laid_in_wait(
    tmp_path: Path, outside: Path
) -> None:
    (tmp_path / f".graph.json.{os.getpid()}.tmp").symlink_to(outside / "log")
    write_json({}, tmp_path / "graph.json")
    untouched(outside)

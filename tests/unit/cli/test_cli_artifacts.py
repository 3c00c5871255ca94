"""Output and errors of ``memlog pull`` and ``memlog open``."""

import dataclasses
import gzip
import json
import os
import pickle
import shlex
from pathlib import Path

import pytest
from support import thirdparty
from support.commands import complaint, memlog
from support.device_snapshots import training
from support.flamegraphs import document
from support.journals import MadeRun, at
from support.stores import DictStore, stored
from support.thirdparty import ListBackend

from memlog._internal.npm_package import SPEEDSCOPE
from memlog.artifacts import server
from memlog.artifacts.pulling import kept
from memlog.artifacts.server import is_openable
from memlog.artifacts.snapshots import read_content
from memlog.cli.open import _find
from memlog.errors import TrackerRejectedError, TrackerUnavailableError
from memlog.events import Artifact, End
from memlog.journal import RunDirectory
from memlog.journal.artifacts import artifact_path


@pytest.fixture(autouse=True)
def _plain_environment(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MEMLOG_DIR", str(tmp_path / "runs"))
    monkeypatch.chdir(tmp_path)
    for name in ("FORCE_COLOR", "TTY_COMPATIBLE", "MLFLOW_TRACKING_URI"):
        monkeypatch.delenv(name, raising=False)


@pytest.fixture
def backend(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> ListBackend:
    return thirdparty.install(tmp_path / "site", monkeypatch)


def run_with(tmp_path: Path, files: dict[str, bytes], *events: Artifact) -> RunDirectory:
    made = MadeRun(tmp_path / "runs")
    folder = made.directory.path / "artifacts"
    folder.mkdir()
    for number, (name, content) in enumerate(files.items()):
        (folder / name).write_bytes(content)
        kind = "flamegraph" if "graph" in name else "file"
        made.write(Artifact(at(number), name, kind, f"artifacts/{name}", len(content)))
    return made.write(*events, End(at(100), "finished")).closed()


GRAPH = json.dumps(document()).encode()


def test_pull_copies_out_of_the_runs_folder_and_says_what_is_next(tmp_path: Path) -> None:
    run_with(tmp_path, {"notes.txt": b"text", "graph 1": b"", "graph-2": GRAPH})
    result = memlog("pull", "latest", "-o", "my files")
    assert (tmp_path / "my files" / "graph-2").read_bytes() == GRAPH
    lines = result.stdout.splitlines()
    assert lines[0].startswith("2 files of run k7m2xq9a from its own folder, ")
    assert lines[2].split() == ["my", "files/notes.txt", "file", "4", "B"]
    assert lines[-1] == f"look at it: memlog open {shlex.quote('my files/graph-2')}"
    # memlog never gives a file the third name.
    assert result.exit_code == 1
    assert "not safe to write (such as 'graph 1')" in result.stderr
    again = memlog("pull", "latest", "--kind", "file", "-o", "my files")
    assert (again.exit_code, again.stderr) == (0, "")
    assert again.stdout.splitlines()[-1].endswith("was here already, the same")


def test_a_journal_that_names_what_is_elsewhere_brings_nothing(tmp_path: Path) -> None:
    (tmp_path / "secret").write_bytes(GRAPH)
    run = run_with(
        tmp_path,
        {},
        Artifact(at(1), "up", "flamegraph", "../../secret", 1),
        Artifact(at(2), "absolute", "flamegraph", str(tmp_path / "secret"), 1),
        Artifact(at(3), "link", "flamegraph", "artifacts/link", 1),
        Artifact(at(4), "folder", "flamegraph", "artifacts", 1),
        Artifact(at(5), "nul", "flamegraph", "a\0b", 1),
        Artifact(at(6), "gone", "flamegraph", "artifacts/gone", 1),
        Artifact(at(7), "through", "flamegraph", "artifacts/out/secret", 1),
    )
    (run.path / "artifacts" / "link").symlink_to(tmp_path / "secret")
    (run.path / "artifacts" / "out").symlink_to(tmp_path)
    assert [artifact_path(run, event) for event in kept(run)] == [None] * 7
    message = complaint("pull", "latest", "-o", "out")
    assert "'up' is no longer in" in message
    assert list((tmp_path / "out").iterdir()) == []
    assert "its 7 files were deleted here" in complaint("open", "latest")


def test_a_missing_run_or_file_is_one_line_with_the_remedy(tmp_path: Path) -> None:
    assert "train with memlog.init()" in complaint("pull", "latest", "-o", "out")
    assert "no file 'x', and no run: there are no runs" in complaint("open", "x")
    run_with(tmp_path, {})
    assert "save_artifact(path) adds one" in complaint("pull", "latest", "-o", "out")
    assert "`memlog run --layers`" in complaint("open", "latest")
    assert "leave out --kind" in complaint("pull", "latest", "--kind", "x", "-o", "out")
    assert "--backend B" in complaint("pull", "zzz", "-o", "out")
    assert "did you mean 'mlflow'?" in complaint(
        "pull", "latest", "--backend", "mlfow", "-o", "out", code=2
    )
    assert "was not delivered to mlflow" in complaint(
        "pull", "latest", "--backend", "mlflow", "-o", "out", code=2
    )
    assert not (tmp_path / "out").exists()


def test_open_takes_a_file_or_the_newest_flame_graph_of_a_run(tmp_path: Path) -> None:
    run = run_with(
        tmp_path, {"graph-1": GRAPH, "graph-2": GRAPH, "graph-3": b"damaged", "other": GRAPH}
    )
    assert _find("latest", None) == run.path / "artifacts" / "graph-2"
    (tmp_path / "latest").write_bytes(b"a file comes first")
    assert _find("latest", None) == Path("latest")


def test_a_file_that_cannot_be_shown_is_one_line(tmp_path: Path) -> None:
    (tmp_path / "text").write_text("hello")
    assert "text can't be shown: memlog opens speedscope" in complaint("open", "text")
    (tmp_path / "chrome.json").write_text('{"traceEvents": [{"name": "a", "ph": "X"}]}')
    assert complaint("open", "chrome.json").endswith("open it at https://ui.perfetto.dev")
    (tmp_path / "torn").write_bytes(GRAPH[:-9])
    message = complaint("open", "torn")
    assert message.startswith("torn can't be shown: it is damaged: ")
    assert message.endswith("fetch it with `memlog pull`")


def test_a_flame_graph_with_a_byte_order_mark_is_one(tmp_path: Path) -> None:
    (tmp_path / "graph").write_bytes(b"\xef\xbb\xbf" + GRAPH)
    assert is_openable(tmp_path / "graph")
    server.check_flamegraph(read_content(tmp_path / "graph"))


class Evil:
    """Object whose pickle runs code when it is loaded."""

    def __reduce__(self) -> object:
        return os.mkdir, ("made by the attacker",)


def test_a_snapshot_that_hides_code_is_one_line_and_runs_nothing(tmp_path: Path) -> None:
    for name, content in {
        "evil.pickle": pickle.dumps({**training(), "x": Evil()}),
        "old.pickle": pickle.dumps({**training(), "x": Evil()}, 0),
        "packed.pickle.gz": gzip.compress(pickle.dumps([Evil(), {"total_size": 1}])),
    }.items():
        (tmp_path / name).write_bytes(content)
        message = complaint("open", name)
        assert message.startswith(name)
        if name != "old.pickle":  # no file of torch begins with this, so it is not read further
            assert "it calls " in message
            assert "don't open it with other programs" in message
    assert not (tmp_path / "made by the attacker").exists()


def test_a_snapshot_that_is_damaged_is_one_line(tmp_path: Path) -> None:
    whole = pickle.dumps(training())
    (tmp_path / "torn.pickle").write_bytes(whole[:-100])
    assert complaint("open", "torn.pickle").startswith("torn.pickle is no pickle of a snapshot")
    (tmp_path / "odd.pickle").write_bytes(pickle.dumps({"segments": [1], "device_traces": []}))
    assert complaint("open", "odd.pickle").startswith("odd.pickle is damaged (")
    (tmp_path / "model.pickle").write_bytes(pickle.dumps({"weights": [1.0]}))
    assert "can't be shown: memlog opens" in complaint("open", "model.pickle")


def test_without_a_viewer_it_is_one_line_with_the_path(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "graph").write_bytes(GRAPH)
    monkeypatch.setenv("PATH", "")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    elsewhere = dataclasses.replace(SPEEDSCOPE, installed=tmp_path / "nowhere")
    monkeypatch.setattr("memlog.artifacts.server.SPEEDSCOPE", elsewhere)
    message = complaint("open", "graph")
    assert str(tmp_path / "graph") in message
    assert "npm is not installed" in message
    assert "install npm" in message


def test_a_trackers_run_is_fetched_by_its_own_id(backend: ListBackend) -> None:
    backend.store = store = DictStore({"graph": GRAPH})
    assert (
        "look at it: memlog open out/graph"
        in memlog("pull", "team/x/1", "--backend", "list", "-o", "out").stdout
    )
    assert set(store.asked) == {"team/x/1"}
    # "latest" works for journals only and is not the id of a run in a tracker.
    assert "there are no runs" in complaint("pull", "latest", "--backend", "list", "-o", "out")


def test_a_run_known_here_is_looked_for_under_the_trackers_id(
    tmp_path: Path, backend: ListBackend
) -> None:
    backend.store = store = DictStore({"graph": GRAPH})
    MadeRun(tmp_path / "runs").bound("list", "theirs-1", "http://their").write(
        End(at(1), "finished")
    ).closed()
    assert memlog("pull", "latest", "--backend", "list", "-o", "out").exit_code == 0
    assert set(store.asked) == {"theirs-1"}
    assert [connection.uri for connection in backend.connected] == ["http://their"]


def test_files_that_came_before_an_outage_are_listed(tmp_path: Path, backend: ListBackend) -> None:
    def bring(path: Path) -> Path:
        if path.name == "b":
            raise TrackerRejectedError("b is refused")
        if path.name == "d":
            raise TrackerUnavailableError("the tracker is down")
        path.write_bytes(b"text")
        return path

    backend.store = DictStore({}, [stored(name) for name in "abcde"], bring)
    result = memlog("pull", "1", "--backend", "list", "-o", "out")
    assert result.exit_code == 1
    assert result.stdout.startswith("2 files of run 1 from list, 8 B\n")
    [line] = result.stderr.splitlines()
    assert line == (
        "memlog: list: the tracker is down; call `memlog pull` again when it can be reached"
    )
    assert {path.name for path in (tmp_path / "out").iterdir()} == {"a", "c"}


def test_many_failures_are_one_short_line(backend: ListBackend) -> None:
    def refuse(path: Path) -> Path:
        raise TrackerRejectedError(f"{path.name} is refused")

    backend.store = DictStore({}, [stored(f"x{number}") for number in range(100)], refuse)
    message = complaint("pull", "1", "--backend", "list", "-o", "out")
    assert message == "x0 is refused; x1 is refused; x2 is refused; and 97 more like these"

"""A run's artifacts: each has a unique name, and memlog logs every change of a name."""

from pathlib import Path

import pytest
from support.sinks import ListSink, ListTracker

import memlog
from memlog.artifacts.pulling import JournalStore, is_safe
from memlog.delivery import run_pages
from memlog.events import POSTMORTEM_FILE
from memlog.journal import find_run
from memlog.journal.artifacts import Names
from memlog.oom import observer
from memlog.reports.summary import summarize
from memlog.sink import Target


@pytest.fixture(autouse=True)
def _runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MEMLOG_DIR", str(tmp_path))


def test_files_that_are_called_differently_are_kept_apart_in_every_sink(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    tracker = ListTracker()
    session = memlog.init([ListSink(tracker, Target("x", None))])
    saved = [
        ("\u00fc.txt", "file"),
        ("\u00f6.txt", "file"),
        ("r.json", "report"),
        ("r.json", "config"),
        ("R.json", "snapshot"),
        ("x.txt", "my/kind:x"),
        ("x.txt", "my kind x"),
        ("postmortem.md", "notes"),
        ("report.html", "report"),
        (f"{'n' * 300}a.csv", "file"),
        (f"{'n' * 300}b.csv", "file"),
        ("k.txt", "k" * 300 + "a"),
        ("k.txt", "k" * 300 + "b"),
    ]
    for round_ in ("first", "last"):
        for number, (name, kind) in enumerate(saved):
            source = tmp_path / "source"
            source.write_text(f"{round_} {number}")
            assert session.save_artifact(source, kind, name=name) is not None
    memlog.finish()
    [files] = tracker.files.values()
    # Only a file of the same name and kind replaces another.
    assert sorted(files.values()) == sorted(f"last {n}".encode() for n in range(len(saved)))
    found = find_run(tmp_path, session.id or "")
    summary = summarize(found)
    kept = [(f.name, f.kind) for f in summary.artifacts]  # in any order of sending
    assert sorted(kept) == sorted((name, kind) for kind, name in files)
    assert {(f.name, f.kind) for f in JournalStore(found).list_artifacts(found.id)} == {
        (name, kind) for kind, name in files
    }
    assert len({f.name.casefold() for f in summary.artifacts}) == len(saved)
    assert all(is_safe(f.name) and is_safe(f.kind) for f in summary.artifacts)
    names = [f.name for f in summary.artifacts]
    assert names[:5] == ["_.txt", names[1], "r.json", "r-config.json", "R-snapshot.json"]
    assert "artifact 'r.json' ('config') is saved as 'r-config.json' ('config')" in caplog.text
    assert caplog.text.count("is saved as") == len(saved) - 1  # `r.json` keeps its name


def test_names_of_memlogs_own_files_are_known() -> None:
    names = Names()
    assert names.give(POSTMORTEM_FILE, "mine")[0] != POSTMORTEM_FILE
    assert names.give(run_pages.FLAME_GRAPH, "mine")[0] != run_pages.FLAME_GRAPH
    assert names.give(observer.FILE, "mine")[0] != observer.FILE


def test_a_file_that_cannot_be_kept_never_harms_training(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    session = memlog.init("local")
    (tmp_path / "file").write_text("")
    for _ in range(3):
        assert session.save_artifact(tmp_path / "nowhere") is None
        assert session.save_artifact(tmp_path / "elsewhere") is None
        assert session.save_artifact(None) is None  # type: ignore[arg-type]
        assert session.save_artifact(tmp_path / "file", 5) is None  # type: ignore[arg-type]
        assert session.save_artifact(tmp_path / "file", "///") is None
    messages = [record.message for record in caplog.records]
    assert session.save_artifact("/dev/zero") is None
    assert "'/dev/zero' was not saved as an artifact: it is a device" in caplog.messages[-1]
    assert session.save_artifact(tmp_path) is None
    assert "was not saved as an artifact: it is a folder: pass an archive" in caplog.messages[-1]
    assert len(messages) == 5
    assert (
        "nowhere' was not saved as an artifact: there is no such file; write it before"
        in messages[0]
    )
    assert "elsewhere' was not saved" in messages[1]
    assert messages[2].endswith("pass a file's path")
    assert "its kind is 5: pass text" in messages[3]
    assert session.health.dropped == {"artifact_not_kept": 17}
    memlog.finish()
    assert session.save_artifact(tmp_path / "file") is None
    assert "the run has ended; save files before memlog.finish()" in caplog.text
    with memlog.init(enabled=False) as off:
        assert off.save_artifact(tmp_path) is None
        assert off.health.dropped == {}

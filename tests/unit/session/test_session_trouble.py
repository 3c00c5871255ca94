"""Behaviour of a session when something around it is broken."""

import math
import os
import signal
import sys
import threading
import time
import types
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
from support.journals import MadeRun
from support.sinks import ListSink, ListTracker

import memlog
from memlog._internal.diagnostics import Diagnostics
from memlog.autolog.run_detector import RunDetector
from memlog.delivery.helper.protocol import Connect, Join, Message
from memlog.errors import ConfigurationError
from memlog.events import Sample
from memlog.journal import JournalWriter, RunDirectory, find_run
from memlog.reports.summary import summarize
from memlog.sink import Connection, Sink, Target, TrackerRun, find_backends


@pytest.fixture(autouse=True)
def runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    monkeypatch.setenv("MEMLOG_DIR", str(tmp_path / "runs"))
    yield tmp_path / "runs"
    memlog.finish()


def test_closing_beside_a_publishing_thread_touches_nobody_elses_file(tmp_path: Path) -> None:
    """A closed descriptor's number soon belongs to another file."""
    for attempt in range(30):
        journal = MadeRun(tmp_path / str(attempt)).trainer
        stop = threading.Event()

        def publish(writer: JournalWriter = journal, stop: threading.Event = stop) -> None:
            while not stop.is_set():
                writer.append(Sample(1, None, 1, 1, 1, 1, 1))

        thread = threading.Thread(target=publish)
        thread.start()
        journal.close()
        with (tmp_path / "checkpoint.bin").open("wb") as checkpoint:
            stop.set()
            thread.join()
            checkpoint.write(b"weights")
        assert (tmp_path / "checkpoint.bin").read_bytes() == b"weights"


def test_a_folder_of_the_users_gets_no_gitignore(tmp_path: Path, runs: Path) -> None:
    memlog.init("local", dir=tmp_path).finish()
    assert not (tmp_path / ".gitignore").exists()
    memlog.init("local").finish()
    assert (runs / ".gitignore").read_text().endswith("*\n")


def test_files_of_the_users_are_no_runs(runs: Path) -> None:
    data = runs / "data"
    data.mkdir(parents=True)
    (data / "train.jsonl").write_text("{}\n")
    run_id = memlog.init("local").id
    memlog.finish()
    assert find_run(runs, "latest").id == run_id


def test_sinks_of_one_class_and_of_a_trackers_name_keep_apart() -> None:
    class Mlflow(ListSink):
        """A user's own class, which must not be taken for the tracker."""

    trackers = [ListTracker() for _ in range(3)]
    sinks = [Mlflow(tracker, Target("mine", None)) for tracker in trackers]
    with memlog.init([*sinks, "local"]) as session:
        for _ in range(3):
            session.step()
    for tracker in trackers:
        assert len(tracker.all_points()) >= 6
        assert tracker.ended == {"own-mine": "finished"}


def kill_helper_of(session: memlog.Session) -> None:
    assert session._live is not None
    pid = session._live._helper.pid
    assert pid is not None
    os.kill(pid, signal.SIGKILL)
    with suppress(ChildProcessError):  # memlog has already noticed the helper's end
        # Until its last thread is gone, which is later than /proc calls it a zombie.
        os.waitid(os.P_PID, pid, os.WEXITED | os.WNOWAIT)


@pytest.mark.parametrize(("backend", "synced"), [("local", False), ("mlflow", True)])
def test_a_dead_helper_is_reported_with_a_remedy_that_works(
    capsys: pytest.CaptureFixture[str],
    caplog: pytest.LogCaptureFixture,
    monkeypatch: pytest.MonkeyPatch,
    backend: str,
    synced: bool,
) -> None:
    """A run that is recorded for no tracker leaves nothing to `memlog sync`, which prints that."""
    monkeypatch.setattr("memlog.delivery.helper.client.PAUSES", (60.0,))  # none before the end
    session = memlog.init(backend, alerts=["host.tree > 9 TiB"])
    session.step()
    kill_helper_of(session)
    session.finish()
    printed = capsys.readouterr().err
    assert (f"memlog sync {session.id}" in printed) == synced
    assert "no longer judged since the helper process ended: 'host.tree > 9 TiB'" in printed
    assert ["the helper process has ended (SIGKILL)" in line for line in caplog.messages] == [True]
    health = summarize(find_run(Path(os.environ["MEMLOG_DIR"]), session.id or "")).health
    assert health.faults == {"the helper process: ended (SIGKILL)": 1}
    assert health.unjudged == {"host.tree > 9 TiB": "no longer, since the helper process ended"}


def test_a_helper_is_restarted_a_few_times_only(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr("memlog.delivery.helper.client.PAUSES", (0.0, 0.1, 0.1))
    monkeypatch.setattr("memlog.session.recording_parts.HELPER_CHECK_INTERVAL_NS", 0)
    session = memlog.init("local")
    assert session._live is not None
    helper = session._live._helper
    seen: list[int | None] = []
    deadline = time.monotonic() + 60
    for _ in range(4):
        while helper.is_away or helper.pid in seen:
            assert time.monotonic() < deadline
            session.step()
        seen.append(helper.pid)
        kill_helper_of(session)
        session.step()
    session.step()
    assert helper.is_away
    assert session.health.faults == {
        "the helper process: ended (SIGKILL)": 4,
        "the helper process: started again": 3,
    }
    assert [message.split(":")[1] for message in caplog.messages] == [
        " the helper process has ended (SIGKILL)",
        " the helper process has ended again, and memlog does not start it again",
    ]
    session.finish()


def test_a_helper_that_cannot_start_affects_delivery_only(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, runs: Path
) -> None:
    monkeypatch.setattr(sys, "executable", "/nonexistent/python")
    session = memlog.init("local")
    session.step()
    session.finish()
    assert "starting the helper process failed" in caplog.text
    assert find_run(runs, session.id or "").id == session.id


def test_a_program_without_stderr_can_finish(monkeypatch: pytest.MonkeyPatch) -> None:
    session = memlog.init("local")
    assert session._live is not None
    os.kill(session._live._helper.pid or 0, signal.SIGKILL)
    monkeypatch.setattr(sys, "stderr", None)
    session.finish()


def test_a_failed_init_leaves_the_running_session_alone(tmp_path: Path) -> None:
    session = memlog.init("local")
    (tmp_path / "file").write_text("")
    with pytest.raises(memlog.UnwritableDirectoryError):
        memlog.init("local", dir=tmp_path / "file")
    assert session.enabled


def test_a_stub_of_a_client_is_not_the_client(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "mlflow", types.ModuleType("mlflow"))
    assert "mlflow" not in find_backends()
    memlog.init().finish()


def test_the_helper_is_apart_from_the_trainer() -> None:
    session = memlog.init("local")
    assert session._live is not None
    helper = session._live._helper
    assert helper.pid is not None
    assert os.getsid(helper.pid) != os.getsid(0)  # the terminal's Ctrl-C is not for it
    big = Connection(environment={"x": "y" * 60_000})
    for _ in range(20):
        helper.send(Connect("mlflow", big))  # a full pipe costs messages, and never time
    session.step()
    session.finish()


class OneRun:
    """A backend whose user has a run open, at an address with a password."""

    name = "one"
    requires = "os"
    extra = "one"

    def active_run(self) -> TrackerRun | None:
        return TrackerRun("abc", "https://me:secret@host/?token=hidden")

    def connection(self) -> Connection:
        return Connection("https://me:secret@host", {"KEY": "secret"})

    def prepare(self) -> None: ...

    def open_sink(self, target: Target) -> Sink:
        raise NotImplementedError


def test_a_joined_runs_password_reaches_the_helper_and_no_file(tmp_path: Path) -> None:
    journal = MadeRun(tmp_path).trainer
    messages: list[Message] = []
    run_detector = RunDetector({"one": OneRun()}, journal, messages.append, Diagnostics())
    run_detector.join_new_runs(0)
    run_detector.join_new_runs(1)  # the second call finds nothing new
    assert messages == [
        Connect("one", Connection("https://me:secret@host", {"KEY": "secret"})),
        Join("one", TrackerRun("abc", "https://me:secret@host/?token=hidden")),
    ]
    written = b"".join(path.read_bytes() for path in tmp_path.rglob("*.jsonl"))
    assert b"abc" in written
    assert b"secret" not in written
    assert b"hidden" not in written


def test_rules_that_were_never_judged_are_named_at_the_end_and_in_show(
    runs: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    rules = ["cuda7.allocated > 1 GiB", "host.rss > 90 TiB", "host.rss grows > 1 GiB/epoch"]
    session = memlog.init("local", alerts=rules)
    session.step()
    memlog.finish()
    line = (
        "memlog: alert rules never judged in this run: 'cuda7.allocated > 1 GiB' (there was no cuda7); "
        "'host.rss grows > 1 GiB/epoch' (no epoch came)\n"
    )
    assert line in capsys.readouterr().err
    unjudged = summarize(find_run(runs, session.id or "")).health.unjudged
    assert unjudged == {
        "cuda7.allocated > 1 GiB": "there was no cuda7",
        "host.rss grows > 1 GiB/epoch": "no epoch came",
    }


@pytest.mark.parametrize("timeout", [-1, "5", math.nan, math.inf, [1]])
def test_an_invalid_timeout_is_one_clear_line(tmp_path: Path, timeout: Any) -> None:
    with memlog.init("local", dir=tmp_path) as session:
        with pytest.raises(ConfigurationError, match=r"timeout=.*: pass a number of seconds"):
            session.finish(timeout=timeout)
        session.step()  # the run goes on
        session.finish(timeout=0)
        assert session.directory is not None
        assert summarize(RunDirectory(session.directory)).steps == 1

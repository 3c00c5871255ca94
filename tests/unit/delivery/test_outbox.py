"""The outbox: alerts and files arrive after the points, and an item that fails delays no other."""

from pathlib import Path

import pytest
from support.sinks import ListTracker

from memlog._internal.diagnostics import Diagnostics
from memlog.delivery.uploader.outbox import take_over
from memlog.delivery.uploader.uploader import Uploader
from memlog.errors import TrackerUnavailableError
from memlog.events import Alert, Artifact, Batch
from memlog.journal import Binding, JournalWriter, RunDirectory, new_run
from memlog.journal.artifacts import keep
from memlog.journal.delivery_state import MAX_ALERTS, Outbox, UploadState

MIB = 1024**2


@pytest.fixture
def run(tmp_path: Path) -> RunDirectory:
    return new_run(tmp_path)


@pytest.fixture
def journal(run: RunDirectory) -> JournalWriter:
    return JournalWriter(
        run.path, run=run.id, role="trainer", begun_us=1, diagnostics=Diagnostics()
    )


def uploader(run: RunDirectory, tracker: ListTracker) -> Uploader:
    return Uploader(run, "list", tracker.open_sink, may_open_own=True)


def batch(step: int) -> Batch:
    return Batch(step * 1000, step, step * MIB, step * MIB, "exact")


def alert(step: int) -> Alert:
    return Alert(step * 1000, step, "warning", "host.rss > 1 GiB", f"at {step}", "")


def kept(run: RunDirectory, content: bytes, name: str = "graph.json") -> Artifact:
    source = run.path.parent / "source"
    source.write_bytes(content)
    return keep(run, source, name, "flamegraph")


def test_alerts_and_files_reach_the_run_that_was_active(
    run: RunDirectory, journal: JournalWriter
) -> None:
    tracker = ListTracker()
    for event in (batch(0), alert(0), kept(run, b"first", "a")):
        journal.append(event)
    journal.bind("list", Binding("users", None))
    for event in (batch(1), alert(1), alert(2), kept(run, b"second", "b")):
        journal.append(event)
    upload = uploader(run, tracker)
    upload.deliver(complete=True)
    # Items from before the user's first run also belong to this run.
    assert tracker.alerts == {"users": [alert(0), alert(1), alert(2)]}
    assert tracker.files == {
        "users": {("flamegraph", "a"): b"first", ("flamegraph", "b"): b"second"}
    }
    upload.deliver(complete=True)
    uploader(run, tracker).deliver(complete=True)
    assert len(tracker.alerts["users"]) == 3


def test_a_later_file_of_the_same_name_takes_the_place(
    run: RunDirectory, journal: JournalWriter
) -> None:
    tracker = ListTracker(down=True)
    upload = uploader(run, tracker)
    for content in (b"worse", b"worst"):
        journal.append(kept(run, content))
        with pytest.raises(TrackerUnavailableError):
            upload.deliver()
    tracker.down = False
    upload.deliver()
    assert tracker.files == {f"own-{run.id}": {("flamegraph", "graph.json"): b"worst"}}
    journal.append(kept(run, b"the worst of all"))
    upload.deliver()
    assert list(tracker.files[f"own-{run.id}"].values()) == [b"the worst of all"]


def test_points_do_not_wait_for_files(
    run: RunDirectory, journal: JournalWriter, monkeypatch: pytest.MonkeyPatch
) -> None:
    tracker = ListTracker()
    upload = uploader(run, tracker)
    journal.append(kept(run, b"content"))
    for step in range(5):
        journal.append(batch(step))
    journal.append(alert(4))

    def fails(*_: object) -> None:
        raise TrackerUnavailableError("the store for files is down: start it")

    with monkeypatch.context() as patch:
        patch.setattr("support.sinks.ListSink.log_artifact", fails)
        for _ in range(3):
            with pytest.raises(TrackerUnavailableError):
                upload.deliver(complete=True)
    assert len(tracker.all_points()) == 11
    assert [shown.step for shown in tracker.alerts[f"own-{run.id}"]] == [4]
    # An uploader in another process sends only the items that were not sent yet.
    successor = uploader(run, tracker)
    successor.deliver(complete=True)
    successor.close()
    assert list(tracker.files[f"own-{run.id}"].values()) == [b"content"]
    assert len(tracker.all_points()) == 11
    assert len(tracker.alerts[f"own-{run.id}"]) == 1


def test_what_is_refused_or_gone_is_counted(run: RunDirectory, journal: JournalWriter) -> None:
    tracker = ListTracker(refused_files=frozenset({"refused"}))
    gone = kept(run, b"", "gone")
    (run.path / gone.path).unlink()
    for artifact in (gone, kept(run, b"", "refused"), kept(run, b"", "good")):
        journal.append(artifact)
    upload = uploader(run, tracker)
    upload.deliver()
    assert upload.state.dropped == {"artifact_missing": 1, "artifact_rejected": 1}
    assert [name for _, name in tracker.files[f"own-{run.id}"]] == ["good"]


@pytest.mark.parametrize("path", ["../secret", "/etc/hostname", "artifacts/../../secret", "a\0b"])
def test_a_journal_cannot_send_a_file_from_elsewhere(
    run: RunDirectory, journal: JournalWriter, path: str
) -> None:
    (run.path.parent / "secret").write_text("key")
    tracker = ListTracker()
    journal.append(Artifact(1, "name", "kind", path, 3))
    uploader(run, tracker).deliver()
    assert tracker.files == {}


def test_a_journal_cannot_send_a_file_through_a_link(
    run: RunDirectory, journal: JournalWriter
) -> None:
    (run.path.parent / "secret").write_text("key")
    run.artifacts.mkdir()
    (run.artifacts / "link").symlink_to(run.path.parent / "secret")
    tracker = ListTracker()
    journal.append(Artifact(1, "link", "kind", "artifacts/link", 3))
    uploader(run, tracker).deliver()
    assert tracker.files == {}


def test_alerts_are_bounded() -> None:
    outbox = Outbox()
    take_over(outbox, None, [alert(0)] * MAX_ALERTS, [])
    outbox.alerts[""].sent = MAX_ALERTS
    take_over(outbox, None, [alert(1), alert(2)], [])
    assert len(outbox.alerts[""].alerts) == MAX_ALERTS
    assert outbox.alerts[""].sent == MAX_ALERTS - 2


class TestASinkThatIsNotDurable:
    """Points count as delivered when the sink is closed. After an unclean end, all points are sent again."""

    def test_an_unclean_end_begins_anew(self, run: RunDirectory, journal: JournalWriter) -> None:
        tracker = ListTracker(durable=False)
        upload = uploader(run, tracker)
        journal.append(kept(run, b"content"))
        for step in range(5):
            journal.append(batch(step))
            journal.append(alert(step))
            upload.deliver()
        on_disk = UploadState.load(run, "list")
        assert on_disk.delivered == 0
        assert on_disk.provisional == upload.state.delivered > 0
        before = len(tracker.all_points())
        successor = uploader(run, ListTracker(durable=False))
        successor.deliver(complete=True)
        assert successor.state.delivered >= before
        successor.close()
        closed = UploadState.load(run, "list")
        assert (closed.delivered, closed.provisional, closed.stage) == (15, 0, "done")

    def test_a_clean_end_sends_nothing_again(
        self, run: RunDirectory, journal: JournalWriter
    ) -> None:
        tracker = ListTracker(durable=False)
        for step in range(6):
            journal.append(batch(step))
            if step % 3 == 2:
                upload = uploader(run, tracker)
                upload.deliver(complete=True)
                upload.close()
        assert len(tracker.all_points()) == 12
        assert UploadState.load(run, "list").delivered == 12

    def test_an_end_that_fails_is_made_good_by_the_next_attempt(
        self, run: RunDirectory, journal: JournalWriter, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """It is unknown which points the tracker has, so a new sink sends all of them again."""
        tracker = ListTracker(durable=False)
        upload = uploader(run, tracker)
        journal.append(kept(run, b"content"))
        for step in range(5):
            journal.append(batch(step))
        upload.deliver(complete=True)

        def fails(*_: object) -> None:
            raise TrackerUnavailableError("not everything was uploaded: wait")

        with monkeypatch.context() as patch:
            patch.setattr("support.sinks.ListSink.close", fails)
            with pytest.raises(TrackerUnavailableError):
                upload.close()
        on_disk = UploadState.load(run, "list")
        assert (on_disk.delivered, on_disk.stage) == (0, "unreachable")
        assert "not everything" in (on_disk.problem or "")
        first = tracker.all_points()
        tracker.points.clear()
        tracker.files.clear()
        upload.deliver(complete=True)
        upload.close()
        assert tracker.all_points() == first
        assert tracker.files
        assert len(tracker.opened) == 2
        closed = UploadState.load(run, "list")
        assert (closed.delivered, closed.stage) == (len(first), "done")

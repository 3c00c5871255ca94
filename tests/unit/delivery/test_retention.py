"""A journal that is too large is thinned: its readers still work, and every peak stays."""

import tempfile
import time
from collections import defaultdict
from pathlib import Path

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from support import own_journal
from support.journals import GIB, MIB, MadeRun, batch, cuda
from support.sinks import ListTracker

from memlog._internal.diagnostics import Diagnostics
from memlog.delivery.helper.retention import WINDOW, Retention
from memlog.delivery.uploader.uploader import Uploader
from memlog.errors import TrackerUnavailableError
from memlog.events import Alert, Batch, Epoch, Evaluation, Event, Run
from memlog.journal import Entry, JournalFile, JournalWriter, RunDirectory
from memlog.journal import writer as journal_writer
from memlog.journal.delivery_state import UploadState
from memlog.journal.segments import compact, is_compactable
from memlog.reports import Summary, summarize
from memlog.settings import Settings

LIMIT = 100_000
STEPS = 3_000


def level(step: int) -> int:
    """Bytes at a step: a small wave, with a few peaks of one step."""
    return GIB + (step * 7919 % 500) * MIB + (4 * GIB if step % 700 == 331 else 0)


def filled(root: Path, steps: int = STEPS) -> MadeRun:
    """A run of many segments that is still written, with some alerts and epochs."""
    made = MadeRun(root, alive=True, segment_bytes=steps * 12)
    made.write(Run(1, "name", "project", ("list",), {}))
    for step in range(steps):
        made.write(batch(step, level(step), cuda(level(step + 1))))
        if step % 250 == 0:
            made.write(Alert(step, step, "warning", "host.rss > 1", f"at {step}", ""))
            made.write(Epoch(step, step // 250, step, 1, 1, "exact"))
    return made


def uploader(run: RunDirectory, tracker: ListTracker) -> Uploader:
    return Uploader(run, "list", tracker.open_sink, may_open_own=True)


def enforce(run: RunDirectory, limit: int = LIMIT, *backends: str) -> None:
    retention = Retention(run, limit, backends)
    while retention.enforce():
        pass


def trainer(run: RunDirectory) -> JournalFile:
    return run.files()[0]


def entries(run: RunDirectory) -> list[Entry]:
    return list(trainer(run).read())


def events(run: RunDirectory, kind: type[Event]) -> list[Event]:
    return [entry.event for entry in entries(run) if isinstance(entry.event, kind)]


def peaks(summary: Summary) -> object:
    return summary.peaks, {n: m.max for n, m in summary.metrics.items() if "peak" in n}


@pytest.mark.parametrize("delivered", [True, False])
def test_the_limit_holds_and_every_peak_alert_and_epoch_stays(
    tmp_path: Path, delivered: bool
) -> None:
    run = filled(tmp_path).directory
    if delivered:
        uploader(run, ListTracker()).deliver()
    before, rare = summarize(run), [events(run, kind) for kind in (Run, Alert, Epoch)]
    assert trainer(run).size > 4 * LIMIT
    enforce(run)
    assert trainer(run).size <= LIMIT
    after = summarize(run)
    assert peaks(after) == peaks(before)
    assert (after.steps, after.run, after.alerts) == (before.steps, before.run, before.alerts)
    assert [events(run, kind) for kind in (Run, Alert, Epoch)] == rare
    steps = {event.step for event in events(run, Batch) if isinstance(event, Batch)}
    assert {step for step in range(STEPS) if step % 700 == 331} <= steps


def test_what_is_gone_is_counted_as_thinned_and_not_as_damage(tmp_path: Path) -> None:
    run = filled(tmp_path).directory
    published = len(entries(run))
    enforce(run)
    health = summarize(run).health
    gone = published - len(entries(run))
    assert gone > STEPS / 2
    assert (health.published, health.thinned) == (published, gone)
    assert health.dropped == {"journal_thinned": gone}


def test_what_every_sink_has_had_goes_first_and_is_no_loss(tmp_path: Path) -> None:
    run = filled(tmp_path).directory
    upload = uploader(run, ListTracker())
    upload.deliver()
    size = trainer(run).size
    enforce(run, size // 2)
    summary = summarize(run)
    assert summary.health.thinned > 0
    assert summary.health.dropped == {}


def test_a_named_sink_that_has_had_nothing_holds_delivered_segments_back(tmp_path: Path) -> None:
    run = filled(tmp_path).directory
    uploader(run, ListTracker()).deliver()
    enforce(run, trainer(run).size // 2, "another")
    health = summarize(run).health
    assert health.dropped == {"journal_thinned": health.thinned}


def test_undelivered_segments_are_thinned_alike_and_the_oldest_first(tmp_path: Path) -> None:
    run = filled(tmp_path).directory
    file = trainer(run)
    enforce(run, file.size * 9 // 10)
    windows = [header.compaction.window if header.compaction else 0 for header in file.headers()]
    assert windows == sorted(windows, reverse=True)
    assert set(windows) == {WINDOW, 0}
    assert windows[-1] == 0  # it is still being written


def test_a_journal_within_its_limit_is_left_alone(tmp_path: Path) -> None:
    run = filled(tmp_path).directory
    before = {path: path.read_bytes() for path in run.path.glob("*.jsonl")}
    enforce(run, Settings().journal_limit)
    assert {path: path.read_bytes() for path in run.path.glob("*.jsonl")} == before


def test_positions_mean_the_same_as_before(tmp_path: Path) -> None:
    """Reading from any position gives the events that were not removed, at their old positions."""
    run = filled(tmp_path, 200).directory
    before = {entry.seq: entry for entry in entries(run)}
    for path in sorted(run.path.glob("*.jsonl"))[:-1]:
        compact(path, 10, lambda e: {} if isinstance(e, Batch) else None, delivered=False)
    left = entries(run)
    assert len(left) < len(before)
    assert all((e.event, e.start, e.end) == before[e.seq][1:2] + before[e.seq][3:] for e in left)
    for at in before.values():
        rest = [entry.seq for entry in trainer(run).read(at.end)]
        assert rest == [entry.seq for entry in left if entry.seq > at.seq]


def test_a_compaction_that_fails_leaves_the_segment_as_it_was(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = filled(tmp_path, 200).directory
    before = {path.name: path.read_bytes() for path in run.path.iterdir() if path.is_file()}

    def fails(_: int) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("os.fsync", fails)
    with pytest.raises(OSError, match="No space left"):
        enforce(run, 4096)
    assert {p.name: p.read_bytes() for p in run.path.iterdir() if p.is_file()} == before


def test_when_the_run_last_wrote_stays_known(tmp_path: Path) -> None:
    run = filled(tmp_path).directory
    before = {path: path.stat().st_mtime_ns for path in run.path.glob("*.jsonl")}
    enforce(run)
    assert {path: path.stat().st_mtime_ns for path in run.path.glob("*.jsonl")} == before


def test_a_segment_without_a_header_is_left_alone_and_the_others_are_not(tmp_path: Path) -> None:
    run = filled(tmp_path).directory
    second = trainer(run).path(2)
    second.write_bytes(b"no header\n" + second.read_bytes())
    before = second.read_bytes()
    enforce(run, 4096)
    assert second.read_bytes() == before
    can_be = [is_compactable(path) for path in sorted(run.path.glob("*.jsonl"))]
    assert can_be == [*[False] * (len(can_be) - 1), True]


def test_a_gap_that_somebody_made_up_leads_nowhere(tmp_path: Path) -> None:
    run = filled(tmp_path, 200).directory
    path = trainer(run).path(1)
    compact(path, 10, lambda _: {}, delivered=False)
    for gap in (b'{"events":1,"delivered":0,"bytes":-9}', b'{"events":-1,"delivered":9,"bytes":9}'):
        with path.open("ab") as file:
            file.write(gap + b"\n")
    file_reader = trainer(run)
    assert list(file_reader.read())
    assert file_reader.skipped == {"garbage": 2}


def test_a_segment_that_claims_to_have_been_endless_is_delivered(tmp_path: Path) -> None:
    run = filled(tmp_path, 200).directory
    path = trainer(run).path(1)
    compact(path, 10, lambda _: {}, delivered=False)
    endless = b'{"events":1,"delivered":0,"bytes":%d}\n' % (2**63 - 1)
    header, rest = path.read_bytes().split(b"\n", 1)
    path.write_bytes(header + b"\n" + endless * 3 + rest + endless)
    tracker = ListTracker()
    upload = uploader(run, tracker)
    upload.deliver(complete=True)
    upload.close()
    assert tracker.all_points()
    assert UploadState.load(run, "list").stage == "done"


@settings(max_examples=80)
@given(st.lists(st.sampled_from(["steps", "epoch", "loss", "deliver", "fail", "restart", "thin"])))
@example(["epoch", "steps", "deliver", "steps", "fail", "thin"])
@pytest.mark.slow
def test_whenever_it_is_thinned_no_point_is_sent_twice(moves: list[str]) -> None:
    """A bucket is not sent again with other values, although the event that closed it was removed."""
    with tempfile.TemporaryDirectory() as directory:
        made = MadeRun(Path(directory), alive=True)
        run, tracker = made.directory, ListTracker()
        upload, step = uploader(run, tracker), 0
        for number, move in enumerate(moves):
            if move == "steps":
                made.write(*(batch(s, level(s), cuda(level(s))) for s in range(step, step + 60)))
                step += 60
            elif move == "epoch":
                made.write(Epoch(number, number, step, 1, 1, "exact"))
            elif move == "loss":
                made.write(Evaluation(number, number, 1.0, 1))
            elif move == "thin":
                enforce(run, 4096)
            elif move == "restart":
                upload = uploader(run, tracker)
            else:
                tracker.down = move == "fail"
                try:
                    upload.deliver()
                except TrackerUnavailableError:
                    assert tracker.down
        tracker.down = False
        upload.deliver(complete=True)
        sent = defaultdict(list)
        for point in tracker.all_points():
            sent[point.name, point.index].append(point)
        assert [points for points in sent.values() if len(points) > 1] == []
        had = {point.index for point in tracker.all_points() if point.axis == "step"}
        left = {e.step for e in events(run, Batch) if isinstance(e, Batch)}
        assert left <= had


@pytest.mark.slow
def test_a_session_keeps_its_limit(tmp_path: Path) -> None:
    import memlog

    config = {"memlog": {"journal_limit": 2**20, "sample_interval": 60}}
    session = memlog.init("local", dir=tmp_path, config=config)
    assert session.directory is not None
    run = RunDirectory(session.directory)
    deadline = time.monotonic() + 60
    while not summarize(run).health.thinned:
        assert time.monotonic() < deadline
        for _ in range(500):
            session.step()
    steps = summarize(run).steps
    session.finish()
    assert summarize(run).steps >= steps
    assert "journal_lost" not in summarize(run).health.dropped


def writer(directory: Path, health: Diagnostics, limit: int = 20_000) -> JournalWriter:
    return own_journal.writer(directory, health, segment_bytes=4096, limit=limit)


def test_without_its_helper_a_journal_still_ends(tmp_path: Path) -> None:
    """Without its helper, only new peaks, some other steps and rare events are written, without gaps."""
    health = Diagnostics()
    journal = writer(tmp_path, health)
    last = 2_000 + journal_writer.EVERY
    for step in range(last):
        journal.append(batch(step, GIB + (MIB * step if step % 500 == 499 and step < 2_000 else 0)))
        if step % 500 == 0:
            journal.append(Epoch(step, step, step, 1, 1, "exact"))
    journal.close()
    read = list(own_journal.reader(tmp_path).read())
    assert sum(path.stat().st_size for path in tmp_path.iterdir()) < 40_000
    assert health.dropped == {"journal_full": last + 6 - len(read)}
    assert [entry.seq for entry in read] == list(range(len(read)))
    steps = {entry.event.step for entry in read if isinstance(entry.event, Batch)}
    assert {499, 999, 1_499, 1_999} <= steps
    assert max(steps) == 1_999 + journal_writer.EVERY
    assert sum(isinstance(entry.event, Epoch) for entry in read) == 6


def test_a_writer_begins_segments_small_enough_for_the_limit(tmp_path: Path) -> None:
    assert Settings(journal_limit=2**20).segment_size == 2**17
    assert Settings().segment_size == Settings().segment_bytes


def recorded(directory: Path) -> list[int]:
    read = own_journal.reader(directory).read()
    return [entry.event.step for entry in read if isinstance(entry.event, Batch)]


def test_recording_goes_on_once_the_journal_is_small_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(journal_writer, "LOOK_EVERY_S", 0.0)
    made = MadeRun(tmp_path, alive=True)
    directory, health, limit = made.directory.path, Diagnostics(), 100_000
    made.trainer.close()
    for path in directory.glob("*.jsonl"):
        path.unlink()
    journal = writer(directory, health, limit)
    for step in range(3_000):
        journal.append(batch(step, GIB))
    assert 2_900 not in recorded(directory)
    Retention(made.directory, limit).enforce_if_due()
    assert sum(file.size for file in made.directory.files()) <= limit
    for step in range(3_000, 3_050):
        journal.append(batch(step, GIB))
    journal.close()
    assert recorded(directory)[-50:] == list(range(3_000, 3_050))

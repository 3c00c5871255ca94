"""The journal: appended events can be read, whatever happens to the file."""

import os
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path

import msgspec
import pytest
from support.own_journal import batch, events, reader, segment, writer

from memlog._internal.diagnostics import Diagnostics
from memlog.errors import RunNotFoundError, UnwritableDirectoryError
from memlog.events import Batch, DeviceReading, End, Event, Loss, Run
from memlog.journal import Binding, Entry, find_run, list_runs, new_run
from memlog.journal.segments import MappedFile


def test_what_is_appended_is_read_back_in_order(tmp_path: Path) -> None:
    written = [Run(1, "name", None, ("mlflow",), {}), batch(0), batch(1), End(5, "failed", "why")]
    journal = writer(tmp_path)
    assert [journal.append(event) for event in written] == [0, 1, 2, 3]
    journal.close()
    assert events(tmp_path) == written


def test_an_event_is_on_disk_when_append_returns(tmp_path: Path) -> None:
    journal = writer(tmp_path)
    journal.append(batch(7))
    assert events(tmp_path) == [batch(7)]


def test_a_batch_event_with_one_device_takes_at_most_180_bytes(tmp_path: Path) -> None:
    largest = 80 * 2**30 - 1
    device = DeviceReading("cuda7", largest, largest, largest, "watermark", largest)
    journal = writer(tmp_path)
    for _ in range(1000):
        journal.append(batch(0))
    before = segment(tmp_path).stat().st_size
    for step in range(1_000_000, 1_000_100):
        journal.append(
            Batch(
                1_795_000_000_000_000,
                step,
                largest,
                largest,
                "watermark",
                (device,),
                largest,
                largest,
            )
        )
    per_event = (segment(tmp_path).stat().st_size - before) / 100
    assert per_event <= 180


def test_a_new_segment_begins_when_one_is_full(tmp_path: Path) -> None:
    journal = writer(tmp_path, segment_bytes=4096)
    written = [batch(step) for step in range(300)]
    for event in written:
        journal.append(event)
    assert len(list(tmp_path.glob("*.jsonl"))) > 3
    assert events(tmp_path) == written


def test_every_position_of_every_segment_goes_on_rightly(tmp_path: Path) -> None:
    journal = writer(tmp_path, segment_bytes=4096)
    for step in range(120):
        journal.append(batch(step))
    entries: list[Entry] = list(reader(tmp_path).read())
    for index, entry in enumerate(entries):
        following = next(reader(tmp_path).read(entry.end), None)
        expected = entries[index + 1].event if index + 1 < len(entries) else None
        assert (following.event if following else None) == expected


def test_a_binding_begins_a_segment_that_names_it(tmp_path: Path) -> None:
    journal = writer(tmp_path)
    journal.append(batch(0))
    journal.bind("mlflow", Binding("abc", "http://127.0.0.1:5000"))
    journal.append(batch(1))
    bindings = [entry.header.bindings for entry in reader(tmp_path).read()]
    assert bindings == [{}, {"mlflow": Binding("abc", "http://127.0.0.1:5000")}]


@pytest.fixture
def unmapped(monkeypatch: pytest.MonkeyPatch) -> None:
    """Write segments with system calls, as on a file system where they can't be mapped."""
    monkeypatch.setattr("memlog.journal.writer.can_map", lambda _: False)


@pytest.mark.usefixtures("unmapped")
def test_a_torn_last_line_is_waited_for_and_then_read(tmp_path: Path) -> None:
    writer(tmp_path).append(batch(0))
    whole = segment(tmp_path).read_bytes()
    line = whole.splitlines(keepends=True)[-1]
    with segment(tmp_path).open("ab") as file:
        file.write(line[:20])
    assert events(tmp_path) == [batch(0)]
    with segment(tmp_path).open("ab") as file:
        file.write(line[20:])
    assert events(tmp_path) == [batch(0), batch(0)]


@pytest.mark.usefixtures("unmapped")
@pytest.mark.parametrize(
    ("line", "reason"),
    [
        (b"garbage\n", "garbage"),
        (b"\xff\x00\n", "garbage"),
        (b'[1,["batch",1,2,"three",null,null]]\n', "garbage"),
        (b'[1,["batch",17950000\n', "torn"),
        (b'[1,["from_the_future",1,2]]\n', "unknown_event"),
        (b"x" * (3 * 1024**2) + b"\n", "too_long"),
        (b"{}\n", "garbage"),
        (b'[1,["batch",1,2,' + b"9" * 400 + b",null,null]]\n", "garbage"),
        (b"\n", "garbage"),
    ],
)
def test_a_line_that_cannot_be_read_costs_itself_alone(
    tmp_path: Path, line: bytes, reason: str
) -> None:
    journal = writer(tmp_path)
    journal.append(batch(0))
    with segment(tmp_path).open("ab") as file:
        file.write(line)
    journal.append(batch(1))
    file_reader = reader(tmp_path)
    assert [entry.event for entry in file_reader.read()] == [batch(0), batch(1)]
    assert dict(file_reader.skipped) == {reason: 1}


def test_a_loss_that_is_no_number_is_unknown(tmp_path: Path) -> None:
    writer(tmp_path).append(Loss(1, 0, float("nan")))
    assert events(tmp_path) == [Loss(1, 0, None)]


def test_fields_that_a_newer_version_adds_are_ignored(tmp_path: Path) -> None:
    writer(tmp_path).close()
    with segment(tmp_path).open("ab") as file:
        file.write(msgspec.json.encode([0, ["end", 5, "finished", None, "new"]]) + b"\n")
    assert events(tmp_path) == [End(5, "finished")]


def test_a_newer_schema_is_left_alone_and_counted(tmp_path: Path) -> None:
    journal = writer(tmp_path)
    journal.append(batch(0))
    text = segment(tmp_path).read_text().replace('"schema":1', '"schema":99', 1)
    segment(tmp_path).write_text(text)
    file_reader = reader(tmp_path)
    assert list(file_reader.read()) == []
    assert file_reader.skipped == {"newer_schema": 1}


def test_threads_lose_nothing_and_keep_their_order(tmp_path: Path) -> None:
    journal = writer(tmp_path, segment_bytes=64 * 1024)
    written = [[Loss(step, thread, 0.0) for step in range(2000)] for thread in range(4)]
    with ThreadPoolExecutor(4) as pool:
        for events_of_one in written:
            pool.submit(lambda own=events_of_one: [journal.append(event) for event in own])
    entries = list(reader(tmp_path).read())
    assert [entry.seq for entry in entries] == list(range(8000))
    for thread, own in enumerate(written):
        assert [e.event for e in entries if e.event.step == thread] == own  # type: ignore[union-attr]


@pytest.mark.usefixtures("unmapped")
def test_a_slow_disk_moves_writing_to_a_queue_that_keeps_the_order(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # With this limit, every write counts as slow, because the test is about the move and not about a disk.
    monkeypatch.setattr("memlog.journal.writer.SLOW_WRITE_NS", -1)
    health = Diagnostics()
    journal = writer(tmp_path, health, segment_bytes=4096)
    written = [batch(step) for step in range(500)]
    for event in written:
        journal.append(event)
    journal.close()
    assert journal.queued
    assert events(tmp_path) == written
    assert not health.dropped


@pytest.mark.usefixtures("unmapped")
def test_writing_returns_from_the_queue_once_the_disk_is_fast_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("memlog.journal.writer.TRY_AGAIN_S", 0.0)
    monkeypatch.setattr("memlog.journal.writer.SLOW_WRITE_NS", -1)
    journal = writer(tmp_path, segment_bytes=4096)
    written: list[Event] = []
    while not journal.queued:
        written.append(batch(len(written)))
        journal.append(written[-1])
    monkeypatch.setattr("memlog.journal.writer.SLOW_WRITE_NS", 10**12)
    deadline = time.monotonic() + 30
    while journal.queued:
        assert time.monotonic() < deadline
        written.append(batch(len(written)))
        journal.append(written[-1])
    assert events(tmp_path) == written  # at once, before the journal is closed
    monkeypatch.setattr("memlog.journal.writer.SLOW_WRITE_NS", -1)
    written.append(batch(len(written)))
    journal.append(written[-1])
    assert journal.queued  # one slow write shows that the disk is not fast
    journal.close()
    assert events(tmp_path) == written


@pytest.mark.usefixtures("unmapped")
def test_what_only_giving_up_pythons_lock_takes_is_not_the_disks(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write = os.write

    def lock_taken_meanwhile(fd: int, data: bytes) -> int:
        written = write(fd, data)
        time.sleep(0.002)
        return written

    monkeypatch.setattr(os, "write", lock_taken_meanwhile)
    journal = writer(tmp_path)
    for step in range(1_000):
        journal.append(batch(step))
    assert not journal.queued


def test_a_closed_journal_takes_nothing_and_says_so(tmp_path: Path) -> None:
    journal = writer(tmp_path)
    journal.close()
    journal.close()
    assert journal.append(batch(0)) == -1


def test_a_forked_child_writes_nothing(tmp_path: Path) -> None:
    journal = writer(tmp_path)
    journal.append(batch(0))
    child = os.fork()
    if child == 0:
        os._exit(0 if journal.append(batch(1)) == -1 else 1)
    assert os.waitpid(child, 0)[1] == 0
    assert events(tmp_path) == [batch(0)]


def test_a_run_is_found_by_id_beginning_or_as_the_latest(tmp_path: Path) -> None:
    runs = []
    for begun in (1, 2):
        run = new_run(tmp_path)
        writer(run.path, begun_us=begun).close()
        runs.append(run.id)
    assert [run.id for run in list_runs(tmp_path)] == runs
    assert find_run(tmp_path, "latest").id == runs[1]
    assert find_run(tmp_path, runs[0]).id == runs[0]
    assert find_run(tmp_path, runs[0][:6]).id == runs[0]


@pytest.mark.parametrize("name", ["", "../x", "nothing", "/etc"])
def test_a_run_that_is_not_there_is_one_clear_line(tmp_path: Path, name: str) -> None:
    with pytest.raises(RunNotFoundError, match="there are no runs in"):
        find_run(tmp_path, name)
    for _ in range(2):
        writer(new_run(tmp_path).path).close()
    with pytest.raises(RunNotFoundError, match=r"memlog runs|name more of the id"):
        find_run(tmp_path, name)


def test_a_folder_that_cannot_be_made_is_one_clear_line(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(UnwritableDirectoryError, match="pass dir=… or set MEMLOG_DIR"):
        new_run(tmp_path / "file")


def test_ranks_that_begin_at_once_share_a_folder_that_none_has_made_yet(tmp_path: Path) -> None:
    ranks = 8
    for attempt in range(20):
        barrier = threading.Barrier(ranks)

        def begin(root: Path, barrier: threading.Barrier) -> str:
            barrier.wait(30)
            return new_run(root).id

        with ThreadPoolExecutor(ranks) as pool:
            root = tmp_path / str(attempt) / "runs"
            begun = [pool.submit(begin, root, barrier) for _ in range(ranks)]
            assert len({run.result(30) for run in begun}) == ranks
        assert (root / ".gitignore").read_text().endswith("*\n")


def test_ctrl_c_at_a_new_segment_loses_nothing_and_leaves_the_users_files_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As soon as the old segment is closed, a file of the user's can get its descriptor number."""
    journal = writer(tmp_path, segment_bytes=4096)
    close = MappedFile.close

    def interrupted(file: MappedFile) -> None:
        close(file)
        monkeypatch.undo()
        raise KeyboardInterrupt

    monkeypatch.setattr(MappedFile, "close", interrupted)
    with suppress(KeyboardInterrupt):
        for step in range(1_000):
            journal.append(batch(step))
    assert step < 999
    with (tmp_path / "the user's").open("w") as users:
        journal.append(batch(0))
        journal.close()
        users.write("mine")
    assert (tmp_path / "the user's").read_text() == "mine"
    assert events(tmp_path) == [*map(batch, range(step + 1)), batch(0)]

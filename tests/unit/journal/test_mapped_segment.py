"""Segments in mapped memory: what a reader sees at any moment, and what survives."""

import gc
import os
import random
import signal
import sys
import time
from pathlib import Path

import pytest
from support import child
from support.own_journal import batch, events, reader, segment, writer

from memlog._internal.diagnostics import Diagnostics
from memlog.events import Artifact, Batch, End, Event, Health
from memlog.journal import JournalFile, RunDirectory
from memlog.journal.format import Binding
from memlog.journal.reader import used_bytes
from memlog.journal.segments import RESERVE, WINDOW, can_map, compact

pytestmark = pytest.mark.skipif(
    sys.platform != "linux", reason="other systems can't allocate a file's space before its use"
)


def test_lines_are_plain_text_up_to_the_first_zero_byte(tmp_path: Path) -> None:
    journal = writer(tmp_path)
    journal.append(batch(0))
    text, zeros = segment(tmp_path).read_bytes().split(b"\0", 1)
    assert text.count(b"\n") == 2
    assert text.endswith(b"]]\n")
    assert not zeros.strip(b"\0")
    assert used_bytes(segment(tmp_path)) == len(text)
    journal.close()
    assert segment(tmp_path).read_bytes() == text


def test_no_event_makes_a_system_call(tmp_path: Path) -> None:
    """The file's descriptor is closed, so a call that used it would fail."""
    journal = writer(tmp_path)
    number = journal._output._file._descriptor.number
    kept = os.dup(number)
    os.close(number)
    for step in range(100):  # below the number of writes between two looks at the file
        journal.append(batch(step))
    os.dup2(kept, number)
    os.close(kept)
    journal.close()
    assert events(tmp_path) == [batch(step) for step in range(100)]


def test_every_line_is_there_across_windows_and_with_lines_longer_than_one(tmp_path: Path) -> None:
    journal, health = writer(tmp_path), Diagnostics()
    written: list[Event] = []
    while used_bytes(segment(tmp_path)) < 4 * WINDOW:
        written += [batch(len(written)), End(1, "failed", "x" * (len(written) % 700))]
        if len(written) % 500 == 0:
            written.append(End(2, "failed", "y" * (WINDOW + 3 * RESERVE)))
        for event in written[-3:]:
            journal.append(event)
        written = [entry.event for entry in reader(tmp_path).read()]
    assert not health.dropped
    journal.close()
    assert [entry.seq for entry in reader(tmp_path).read()] == list(range(len(written)))
    assert segment(tmp_path).stat().st_size == used_bytes(segment(tmp_path))


def test_a_line_that_is_being_copied_is_waited_for(tmp_path: Path) -> None:
    """A copy may become visible in any order of its bytes."""
    journal = writer(tmp_path)
    journal.append(batch(0))
    before = used_bytes(segment(tmp_path))
    journal.append(batch(1))
    whole, end = segment(tmp_path).read_bytes(), used_bytes(segment(tmp_path))
    chance = random.Random(1)  # noqa: S311 - bytes, not secrets
    for _ in range(300):
        missing = chance.sample(range(before, end), chance.randint(1, end - before))
        partial = bytearray(whole)
        for at in missing:
            partial[at] = 0
        (tmp_path / "copy").mkdir(exist_ok=True)
        copy = tmp_path / "copy" / segment(tmp_path).name
        copy.write_bytes(partial)
        following = JournalFile(copy.parent, reader(tmp_path).process)
        [entry] = following.read()
        assert entry.event == batch(0)
        assert not following.skipped
        assert len(list(following.read(complete=True))) == 1
        assert sum(following.skipped.values()) == (len(missing) < end - before)
        assert following.has_grown(entry.end) == bool(partial[before])
        copy.write_bytes(whole)
        assert [one.event for one in following.read(entry.end)] == [batch(1)]


def test_a_line_that_was_completed_while_it_was_read_is_read_again(tmp_path: Path) -> None:
    """A reader can get a later line with an earlier one that it read before the line was complete."""
    journal = writer(tmp_path)
    ends = []
    for step in range(4):
        journal.append(batch(step))
        ends.append(used_bytes(segment(tmp_path)))
    whole = segment(tmp_path).read_bytes()
    for hole in (slice(ends[0], ends[1]), slice(ends[0] + 7, ends[1]), slice(ends[0], ends[1] - 1)):
        (tmp_path / "copy").mkdir(exist_ok=True)
        copy = tmp_path / "copy" / segment(tmp_path).name
        partial = bytearray(whole)
        partial[hole] = bytes(hole.stop - hole.start)
        copy.write_bytes(partial)
        file = JournalFile(copy.parent, reader(tmp_path).process)
        entries = file.read()
        assert next(entries).event == batch(0)  # its buffer now holds the whole file
        with copy.open("r+b") as opened:
            opened.write(whole)
        assert [entry.event for entry in entries] == [batch(1), batch(2), batch(3)]
        assert not file.skipped


def test_a_damaged_line_costs_itself_alone(tmp_path: Path) -> None:
    journal = writer(tmp_path)
    for step in range(3):
        journal.append(batch(step))
    data = segment(tmp_path).read_bytes()
    at = data.index(b"\n", data.index(b"\n") + 1) + 9
    with segment(tmp_path).open("r+b") as file:
        file.seek(at)
        file.write(b"\0\0")
    for complete in (False, True):
        file_reader = reader(tmp_path)
        found = [entry.event for entry in file_reader.read(complete=complete)]
        assert found == [batch(0), batch(2)]
        assert sum(file_reader.skipped.values()) == 1


def test_a_signal_handler_may_write_at_any_moment(tmp_path: Path) -> None:
    journal = writer(tmp_path, segment_bytes=100_000)
    numbers = iter(range(1_000_000, 2_000_000))
    signal.signal(signal.SIGALRM, lambda *_: journal.append(batch(next(numbers))))
    signal.setitimer(signal.ITIMER_REAL, 0.0002, 0.0002)
    try:
        for step in range(20_000):
            journal.append(batch(step))
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, signal.SIG_DFL)
    file = reader(tmp_path)
    steps = [entry.event.step for entry in file.read() if isinstance(entry.event, Batch)]
    interrupted = next(numbers) - 1_000_000
    assert interrupted > 10
    assert sorted(steps) == [*range(20_000), *range(1_000_000, 1_000_000 + interrupted)]
    assert not file.skipped


def test_a_signal_handler_may_begin_the_next_segment_before_a_write(tmp_path: Path) -> None:
    """The handler runs after the segment is chosen, when the write to it is entered."""
    journal = writer(tmp_path)
    first = journal._output.mapped
    assert first is not None
    write, switched = first.write, []

    def interrupted(line: bytes, event: Event | None) -> None:
        if not switched:
            switched.append(True)
            journal.bind("mlflow", Binding("run"))
        write(line, event)

    first.write = interrupted  # type: ignore[method-assign]  # as if a signal came here
    journal.append(batch(0))
    journal.append(batch(1))
    journal.close()
    assert events(tmp_path) == [batch(0), batch(1)]


def test_a_forked_copy_leaves_the_file_alone(tmp_path: Path) -> None:
    journal = writer(tmp_path)
    journal.append(batch(0))
    pid = os.fork()
    if pid == 0:
        journal._output._file.close()
        del journal
        gc.collect()
        os._exit(0)
    assert os.waitpid(pid, 0)[1] == 0
    for step in range(1, 3_000):
        journal.append(batch(step))
    journal.close()
    assert events(tmp_path) == [batch(step) for step in range(3_000)]


def test_the_last_write_is_that_of_the_last_event(tmp_path: Path) -> None:
    """The system records no time for a store into memory."""
    journal = writer(tmp_path)
    later = int(time.time() * 1e6) + 5_000_000
    journal.append(Batch(later, 0, 1, 1, "watermark"))
    assert RunDirectory(tmp_path).last_write() == later / 1e6
    journal.close()
    os.utime(segment(tmp_path), (1.0, 1.0))
    assert RunDirectory(tmp_path).last_write() == 1.0


def test_thinning_drops_the_zero_bytes_of_a_killed_process(tmp_path: Path) -> None:
    journal = writer(tmp_path)
    for step in range(100):
        journal.append(batch(step))
    assert segment(tmp_path).stat().st_size > used_bytes(segment(tmp_path))
    compact(segment(tmp_path), 10, lambda _: {"x": 1.0}, delivered=False)
    assert b"\0" not in segment(tmp_path).read_bytes()
    assert [e.step for e in events(tmp_path) if isinstance(e, Batch)][-1] == 99


def test_only_local_file_systems_are_mapped(tmp_path: Path) -> None:
    assert not can_map(Path("/proc"))
    assert not can_map(tmp_path / "absent")


FULL = """
    import os
    import resource
    from pathlib import Path

    from memlog._internal.diagnostics import Diagnostics
    from memlog.events import Artifact, Batch, End, Finding, Health
    from memlog.journal import JournalWriter

    health = Diagnostics()
    journal = JournalWriter(
        Path("."), run="run", role="trainer", begun_us=1, diagnostics=health, segment_bytes=10**9
    )
    resource.setrlimit(resource.RLIMIT_FSIZE, (70_000, resource.RLIM_INFINITY))
    written = 0
    while health.dropped["journal_write"] < 25:
        written += journal.append(Batch(1, written, 2**30, 2**30, "watermark")) >= 0
    for _ in range(400):   # these leave room for the end
        journal.append(Artifact(1, "flamegraph", "name", "artifacts/name", 1000))
    before_end = health.dropped["journal_write"]
    journal.append(Health(1, 7, None, 0.0, dict(health.dropped), {}, steps=7))
    journal.append(End(1, "finished"))
    assert health.dropped["journal_write"] == before_end
    resource.setrlimit(resource.RLIMIT_FSIZE, (resource.RLIM_INFINITY, resource.RLIM_INFINITY))
    for step in range(100):
        journal.append(Batch(1, 10**6 + step, 2**30, 2**30, "watermark"))
    journal.close()
    print(before_end, health.dropped["journal_write"])
"""


def test_a_full_disk_has_room_for_the_end_and_the_counts(tmp_path: Path) -> None:
    before_end, lost = map(int, child.run(FULL, tmp_path).split())
    [file] = RunDirectory(tmp_path).files()
    entries = list(file.read())
    found = [entry.event for entry in entries]
    assert not file.skipped
    [health] = [event for event in found if isinstance(event, Health)]
    assert health.dropped == {"journal_write": before_end}
    assert found.index(health) + 1 == found.index(End(1, "finished"))
    kept = sum(isinstance(event, Artifact) for event in found)
    assert 10 < kept < 400
    assert entries[-1].seq + 1 - len(entries) == lost  # the numbers have a gap for each lost event
    steps = [event.step for event in found if isinstance(event, Batch)]
    assert steps[-1] == 10**6 + 99  # recorded again once there is room

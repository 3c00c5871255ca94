"""The journal's disk is full, deleted, read-only or slow: training goes on, and the loss is counted."""

import json
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest
from support import child
from support.mlflow_server import sqlite_store

from memlog.events import End
from memlog.journal import find_run
from memlog.journal.delivery_state import UploadState
from memlog.reports import summarize

pytestmark = pytest.mark.integration

STEPS = 3_000

TRAINER = """
    import json
    import os
    import sys
    import time

    import memlog

    {prepare}
    config = {{"segment_bytes": {segment_bytes}, "sample_interval": 60, "quiet": True}}
    session = memlog.init("{backend}", dir=sys.argv[1], config={{"memlog": config}})
    while not any(path.stat().st_size for path in session.directory.glob("helper-*")):
        time.sleep(0.01)
    for step in range({steps}):
        if step == 100:
            {trouble}
        session.step()
    published = session._live._journal._seq + 2   # health and end
    session.finish()
    dropped, faults = session.health.dropped, session.health.faults
    print(json.dumps({{"published": published, "dropped": dropped, "faults": faults}}))
"""


class Outcome:
    """Result of a trainer whose disk failed at its hundredth step."""

    def __init__(
        self,
        directory: Path,
        trouble: str,
        *,
        prepare: str = "",
        segment_bytes: int = 1_000_000,
        runs: Path | None = None,
        backend: str = "local",
        **environment: str,
    ) -> None:
        script = TRAINER.format(
            trouble=trouble,
            prepare=prepare,
            segment_bytes=segment_bytes,
            steps=STEPS,
            backend=backend,
        )
        process = child.start(script, directory, str(runs or directory / "runs"), **environment)
        output, self.errors = process.communicate(timeout=120)
        assert process.returncode == 0, self.errors
        printed = json.loads(output.splitlines()[-1])
        self.published: int = printed["published"]
        self.dropped: dict[str, int] = printed["dropped"]
        self.faults: dict[str, int] = printed["faults"]

    @property
    def warnings(self) -> list[str]:
        return [line for line in self.errors.splitlines() if line]


def in_journal(runs: Path) -> int:
    """Return the number of the trainer's events that can be read."""
    return sum(1 for _ in find_run(runs, "latest").files()[0].read())


FULL = """
            import resource
            resource.setrlimit(resource.RLIMIT_FSIZE, (50_000, 50_000))
"""


def test_a_file_that_may_not_grow(tmp_path: Path) -> None:
    run = Outcome(tmp_path, FULL.strip())
    lost = run.dropped["journal_write"]
    assert lost > STEPS / 2
    # The journal has a part of the line that was cut off. The line counts as lost.
    assert in_journal(tmp_path / "runs") == run.published - lost
    assert len(run.warnings) == 2
    assert "could not be written" in run.warnings[0]
    assert f"{lost} events" in run.warnings[1]
    summary = summarize(find_run(tmp_path / "runs", "latest"))
    assert summary.status == "finished"  # the helper process writes the end and the counts
    assert summary.health.dropped["journal_write"] == lost


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    disk = tmp_path / "disk"
    disk.mkdir()
    mount = ["mount", "-t", "tmpfs", "-o", "size=256k", "memlog-test", str(disk)]
    try:
        subprocess.run(mount, check=True, capture_output=True, timeout=60)
    except (OSError, subprocess.CalledProcessError) as error:
        pytest.skip(f"a small disk can be mounted by root alone: {error}")
    yield disk
    subprocess.run(["umount", "--lazy", str(disk)], check=True, timeout=60)


def test_a_full_disk_and_room_again(tmp_path: Path, small_disk: Path) -> None:
    fill = f"open({str(small_disk / 'full')!r}, 'wb', buffering=0).write(bytes(300_000))"
    room = f"os.unlink({str(small_disk / 'full')!r}) if step == 2_000 else None"
    run = Outcome(tmp_path, f"{fill}\n        {room}", runs=small_disk)
    lost = run.dropped["journal_write"]
    assert 0 < lost < 2_000
    # A line without its newline counts as lost. It can be read if the next write begins with a newline.
    assert in_journal(small_disk) - (run.published - lost) in (0, 1)
    assert len(run.warnings) == 2
    assert "No space left on device" in run.warnings[0] or "disk is full" in run.warnings[0]
    summary = summarize(find_run(small_disk, "latest"))
    assert summary.steps == STEPS  # steps are recorded again after there is room
    assert summary.health.dropped["journal_write"] == lost


def test_a_run_that_finishes_on_a_full_disk_is_finished(tmp_path: Path, small_disk: Path) -> None:
    """The space for the end and the counts is reserved when the run begins. `memlog sync` changes nothing."""
    from mlflow import MlflowClient

    uri = sqlite_store(tmp_path)
    fill = f"open({str(small_disk / 'full')!r}, 'wb', buffering=0).write(bytes(300_000))"
    run = Outcome(tmp_path, fill, runs=small_disk, backend="mlflow", MLFLOW_TRACKING_URI=uri)
    lost, found = run.dropped["journal_write"], find_run(small_disk, "latest")
    assert lost > STEPS / 2
    assert in_journal(small_disk) == run.published - lost
    [file] = found.files("trainer")
    assert [entry.event.status for entry in file.read() if isinstance(entry.event, End)] == [
        "finished"
    ]

    def expect_finished() -> None:
        summary = summarize(found)
        assert summary.status == "finished"
        assert summary.alerts == []
        assert {k: n for k, n in summary.health.dropped.items() if "journal" in k} == {
            "journal_write": lost
        }
        own = UploadState.load(found, "mlflow").own_run
        assert own is not None
        assert MlflowClient(uri).get_run(own.run_id).info.status == "FINISHED"

    expect_finished()
    sync = ("sync", "latest", "--dir", str(small_disk))
    child.commands(sync, directory=tmp_path, MLFLOW_TRACKING_URI=uri)
    expect_finished()
    assert not (found.artifacts / "postmortem.md").exists()


FULL_FROM_THE_START = """
    import sys
    import time

    import memlog

    session = memlog.init("local", dir=sys.argv[1], alerts=["host.tree > 900 TiB"])
    open(sys.argv[1] + "/full", "wb", buffering=0).write(bytes(300_000))
    deadline = time.monotonic() + 60
    while not session.health.faults and time.monotonic() < deadline:
        session.step()
        time.sleep(0.01)
    session.finish()
"""


def test_a_helper_without_room_for_its_journal_says_so(tmp_path: Path, small_disk: Path) -> None:
    process = child.start(FULL_FROM_THE_START, tmp_path, str(small_disk))
    _, errors = process.communicate(timeout=120)
    assert process.returncode == 0, errors
    messages = [line for line in errors.splitlines() if "the helper process has ended (" in line]
    assert len(messages) == 1, errors
    assert (
        "can't create its file in the run's folder, for example because the disk is full"
        in messages[0]
    )


GONE = "__import__('shutil').rmtree(sys.argv[1])"


@pytest.mark.parametrize("segment_bytes", [4096, 1_000_000])
def test_a_folder_that_is_gone(tmp_path: Path, segment_bytes: int) -> None:
    """Writes to a deleted file do not fail."""
    run = Outcome(tmp_path, GONE, segment_bytes=segment_bytes)
    assert run.dropped["journal_gone"] >= STEPS - 100 - 200
    [warning, end] = run.warnings
    assert "was deleted" in warning
    assert "are lost" in end
    assert not (tmp_path / "runs").exists()


READ_ONLY = """
            import subprocess
            if os.getuid() == 0:   # whom permissions don't stop
                path = str(session.directory)
                subprocess.run(["mount", "--bind", path, path], check=True)
                subprocess.run(["mount", "-o", "remount,bind,ro", path], check=True)
            else:
                os.chmod(session.directory, 0o555)
"""


def test_a_disk_that_stays_full_is_reported_once_and_shown(
    tmp_path: Path, small_disk: Path
) -> None:
    """Neither an event nor a new segment can be written."""
    fill = f"open({str(small_disk / 'full')!r}, 'wb', buffering=0).write(bytes(300_000))"
    run = Outcome(tmp_path, fill, runs=small_disk, segment_bytes=8_192)
    assert len(run.warnings) == 2, run.warnings
    assert "OSError" not in "".join(run.warnings)
    health = summarize(find_run(small_disk, "latest")).health
    assert health.faults == run.faults != {}
    assert health.dropped["journal_write"] == run.dropped["journal_write"]
    assert health.overhead_ms_total
    assert health.overhead_ms_per_step


@pytest.mark.usefixtures("small_disk")  # skips the test if nothing can be mounted
def test_a_folder_that_turns_read_only_loses_nothing(tmp_path: Path) -> None:
    """If a new segment can't be created, events go to the old one."""
    try:
        run = Outcome(tmp_path, READ_ONLY.strip(), segment_bytes=50_000)
    finally:
        for folder in (tmp_path / "runs").iterdir():
            subprocess.run(["umount", "--lazy", str(folder)], check=False, capture_output=True)
    assert not run.dropped
    assert run.faults["beginning the journal's next segment: OSError"] > 1
    assert len(run.warnings) == 1
    assert in_journal(tmp_path / "runs") == run.published


SLOW_WRITES = """
    import threading
    write, waited, slow = os.write, [], False
    def slowly(fd, data, *size):
        if slow:
            time.sleep(0.05)
            waited.append(threading.current_thread() is threading.main_thread())
        return write(fd, data)
    os.write = slowly
    from memlog.journal import writer
    writer._write = slowly
    writer.can_map = lambda _: False   # a store into memory waits for no write
"""


def test_a_disk_that_takes_50_ms_a_write_holds_nobody_up(tmp_path: Path) -> None:
    check = "import atexit; atexit.register(lambda: print(sum(waited), file=sys.stderr))"
    run = Outcome(tmp_path, f"slow = True\n            {check}", prepare=SLOW_WRITES.strip())
    [slow, queue, end, waits] = run.warnings
    assert "moved to a background queue" in slow
    assert "too slow for the journal's last events" in queue
    assert int(waits) <= 20 + 3  # then the trainer's thread waits no more
    lost = run.dropped["journal_queue_full"]
    assert f"{lost} events" in end
    assert in_journal(tmp_path / "runs") >= run.published - lost


@pytest.fixture
def freezing_disk(tmp_path: Path) -> Iterator[Path]:
    disk, image = tmp_path / "disk", tmp_path / "image"
    disk.mkdir()
    with image.open("wb") as file:
        file.truncate(32 * 1024**2)
    try:
        for command in (["mkfs.ext4", "-q", image], ["mount", "-o", "loop", image, disk]):
            subprocess.run(command, check=True, capture_output=True, timeout=60)
    except (OSError, subprocess.CalledProcessError) as error:
        pytest.skip(f"a disk that can be frozen is mounted by root alone: {error}")
    yield disk
    subprocess.run(["fsfreeze", "--unfreeze", disk], check=False, capture_output=True)
    subprocess.run(["umount", "--lazy", disk], check=True, timeout=60)


FROZEN = """
    import subprocess
    import sys
    import time

    import memlog

    disk = sys.argv[1]
    session = memlog.init("local", dir=disk)
    taken, begun = [], time.monotonic()
    froze = None
    while time.monotonic() - begun < 4:
        if froze is None and time.monotonic() - begun > 1:
            froze = subprocess.Popen(["sh", "-c", f"sleep 1.5; fsfreeze --unfreeze {disk}"])
            subprocess.run(["fsfreeze", "--freeze", disk], check=True)
        before = time.monotonic()
        session.step()
        taken.append(time.monotonic() - before)
        time.sleep(0.001)
    session.finish()
    froze.wait()
    print(session.id, len(taken), max(taken), sorted(taken)[-2], *session.health.dropped)
"""


def test_a_file_system_that_stands_still_holds_one_step_for_as_long(
    tmp_path: Path, freezing_disk: Path
) -> None:
    """A write that hangs holds up a step without a limit: nothing shows whether the write will return."""
    output = child.run(FROZEN, tmp_path, str(freezing_disk), timeout=120)
    run_id, steps, longest, second, *dropped = output.split()
    assert dropped == []
    assert 1 < float(longest) < 10
    assert float(second) < 1
    assert summarize(find_run(freezing_disk, run_id)).steps == int(steps)

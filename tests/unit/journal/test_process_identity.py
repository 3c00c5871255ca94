"""Detecting whether a run's process lives: the clock may change, and the pid may be used again."""

import os
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import msgspec
import psutil
import pytest
from support.journals import GIB, MadeRun, batch

from memlog.journal import ProcessIdentity, RunDirectory, runs

LINUX = pytest.mark.skipif(
    not sys.platform.startswith("linux"), reason="the kernel's own figures are Linux's"
)


def run_of(identity: ProcessIdentity, root: Path) -> RunDirectory:
    """Make a run without an end, of a process with this identity."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(ProcessIdentity, "own", lambda: identity)
        return MadeRun(root, alive=True).write(batch(0, GIB)).closed()


def own(**changes: object) -> ProcessIdentity:
    return msgspec.structs.replace(ProcessIdentity.own(), **changes)


@LINUX
@pytest.mark.parametrize("seconds", [-86_400.0, -5.0, 5.0, 86_400.0])
def test_a_step_of_the_clock_ends_no_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, seconds: float
) -> None:
    """The kernel computes a process's start from the wall clock, so a step of the clock changes it."""
    run = run_of(own(), tmp_path)
    known = psutil.Process.create_time
    monkeypatch.setattr(psutil.Process, "create_time", lambda self: known(self) + seconds)
    assert run.is_alive()


@LINUX
def test_without_the_boots_id_a_run_that_writes_lives(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A container's /proc may have processes alone."""
    run = run_of(own(), tmp_path)
    read = Path.read_text

    def absent(path: Path, **options: Any) -> str:
        if path.name == "boot_id":
            raise FileNotFoundError(2, "No such file or directory", str(path))
        return read(path, **options)

    monkeypatch.setattr(Path, "read_text", absent)
    assert run.is_alive()


@LINUX
@pytest.mark.parametrize("changes", [{"ticks": 1}, {"boot": "another"}])
def test_what_is_another_process_is_not_the_runs(
    tmp_path: Path, changes: dict[str, object]
) -> None:
    """The run's process id was used again, perhaps after a reboot."""
    assert not run_of(own(**changes), tmp_path).is_alive()


@pytest.mark.parametrize(("moved", "lives"), [(0.0, True), (-60.0, False)])
def test_a_journal_of_before_is_judged_as_before(tmp_path: Path, moved: float, lives: bool) -> None:
    """Old journals lack the kernel's values."""
    identity = own(started=ProcessIdentity.own().started + moved, boot=None, ticks=None)
    run = run_of(identity, tmp_path)
    [segment] = run.path.glob("*.jsonl")
    segment.write_bytes(
        segment.read_bytes().replace(b',"boot":null,"ticks":null,"program":null', b"")
    )
    assert b"boot" not in segment.read_bytes()
    assert run.is_alive() is lives


@LINUX
def test_where_other_users_processes_are_hidden_a_run_lives_that_writes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = run_of(own(), tmp_path)

    def hidden(pid: int) -> None:
        raise PermissionError(pid)

    monkeypatch.setattr(runs, "birth_of", hidden)
    assert run.is_alive()
    [segment] = run.path.glob("*.jsonl")
    os.utime(segment, (0, 0))
    assert not run.is_alive()


BEGIN = """
import sys
from pathlib import Path
from support.journals import GIB, MadeRun, batch
MadeRun(Path(sys.argv[1]), alive=True).write(batch(0, GIB)).closed()
print("begun", flush=True)
sys.stdin.readline()
"""


def test_a_process_that_nobody_has_collected_is_dead(tmp_path: Path) -> None:
    with subprocess.Popen(
        [sys.executable, "-c", BEGIN, str(tmp_path)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        env={**os.environ, "PYTHONPATH": str(Path(__file__).parents[2])},
    ) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == b"begun\n"
        run = RunDirectory(tmp_path / "k7m2xq9a")
        assert run.is_alive()
        process.kill()
        while psutil.Process(process.pid).status() != psutil.STATUS_ZOMBIE:
            time.sleep(0.01)
        assert not run.is_alive()

"""The process tree, with real processes that hold real memory."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

import psutil
import pytest

from memlog._internal.terminal import MIB
from memlog.probes.machine import (
    ProcessTree,
    TreeReading,
    available_memory,
    machine_memory,
    read_again,
)

pytestmark = pytest.mark.integration
linux = pytest.mark.skipif(sys.platform != "linux", reason="proportional sizes come from /proc")

# Each program allocates its memory, and then prints its process id (and its child's). It ends when its
# standard input is closed.
HOLDER = """
import os, sys
held = b"x" * (int(sys.argv[1]) << 20)
print(os.getpid(), flush=True)
sys.stdin.read()
"""

PARENT = f"""
import os, subprocess, sys
child = subprocess.Popen(
    [sys.executable, "-c", {HOLDER!r}, sys.argv[1]], stdin=subprocess.PIPE, stdout=subprocess.PIPE
)
print(os.getpid(), int(child.stdout.readline()), flush=True)
sys.stdin.read()
child.communicate()
"""

FORKER = """
import os, sys
held = b"x" * (int(sys.argv[1]) << 20)
child = os.fork()
if child:
    print(os.getpid(), child, flush=True)
sys.stdin.read()
if child:
    os.wait()
"""


@contextmanager
def running(program: str, held_mib: int) -> Iterator[list[int]]:
    """Run the program during the block, and yield the process ids that it prints."""
    with subprocess.Popen(
        [sys.executable, "-c", program, str(held_mib)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    ) as process:
        yield [int(pid) for pid in process.stdout.readline().split()]


def pss(reading: TreeReading) -> int:
    return reading.pss


def test_counts_the_root_and_its_descendants() -> None:
    with running(PARENT, 100) as (parent, child):
        whole, alone = ProcessTree(parent).read(), ProcessTree(child).read()

        assert whole.processes == 2
        assert alone.processes == 1
        assert pss(whole) > pss(alone) > 100 * MIB


def test_a_process_that_is_left_out_is_not_counted_nor_its_descendants() -> None:
    with ExitStack() as stack:
        helper, _ = stack.enter_context(running(PARENT, 100))
        worker, _ = stack.enter_context(running(PARENT, 1))
        tree = ProcessTree(os.getpid(), psutil.Process(helper).cmdline()[1:])
        members = {process.pid for process in tree._members()}

        ours = {process.pid for process in psutil.Process().children(recursive=True)}
        theirs = {helper, *(child.pid for child in psutil.Process(helper).children())}
        assert len(theirs) == 2
        assert members == {os.getpid()} | ours - theirs
        assert worker in members


@linux
def test_a_second_reading_is_of_the_same_memory_without_processes_that_ended() -> None:
    with running(PARENT, 50) as (parent, _):
        [child] = ProcessTree(parent).read().children
        [again] = read_again([child])
        assert again.anon == pytest.approx(child.anon, abs=MIB)
        assert (again.role, again.pid, again.started) == (child.role, child.pid, child.started)
    assert read_again([child]) == []


@linux
def test_memory_shared_by_fork_is_counted_once() -> None:
    with running(FORKER, 200) as (parent, _):
        reading = ProcessTree(parent).read()

        assert reading.processes == 2
        assert 200 * MIB < pss(reading) < 300 * MIB
        [child] = reading.children
        assert (child.anon or 0) > 200 * MIB
        assert child.own is not None
        assert child.own < 50 * MIB


def test_where_the_kernel_does_not_tell_shares_the_resident_set_is_taken(tmp_path: Path) -> None:
    with running(HOLDER, 100) as (pid,):
        reading = ProcessTree(pid, proc=tmp_path).read()

        assert reading == TreeReading(psutil.Process(pid).memory_info().rss, 1)


def test_an_ended_process_that_nobody_has_waited_for_is_skipped() -> None:
    with running(PARENT, 10) as (parent, child):
        ended = psutil.Process(child)
        ended.kill()
        while ended.status() != psutil.STATUS_ZOMBIE:
            pass

        assert ProcessTree(parent).read().processes == 1


def test_a_process_that_is_gone_is_unknown() -> None:
    with running(HOLDER, 1) as (pid,):
        tree = ProcessTree(pid)

    assert tree.read() == TreeReading(None, None)
    assert ProcessTree(pid).read() == TreeReading(None, None)


def test_available_memory_is_some_of_the_machines() -> None:
    available = available_memory()

    assert available is not None
    assert 0 < available <= psutil.virtual_memory().total == machine_memory()

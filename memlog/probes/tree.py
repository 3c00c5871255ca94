"""Memory of the whole process tree, and the roles of its processes. Too slow for the trainer's thread."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path, PurePath
from typing import NamedTuple

import msgspec
import psutil

from memlog.events import ChildReading

_KIB = 1024
_MOST = 32
"""Maximum number of descendants whose sizes are returned one by one. The oldest are returned."""


class TreeReading(NamedTuple):
    """Memory of a process tree at one moment. A field is ``None`` if unknown."""

    pss: int | None
    """Proportional set size in bytes: each page is divided by the number of processes that share it."""
    processes: int | None
    file: int | None = None
    """Bytes of ``pss`` that are pages of mapped files."""
    children: tuple[ChildReading, ...] = ()
    """The descendants, the oldest first; at most 32."""
    children_shared: int | None = None
    """Bytes of shared memory in the proportional set sizes of all descendants together."""
    swap: int | None = None
    """Bytes in swap, which ``pss`` does not contain. ``None`` also if the machine has no swap."""


class _Size(NamedTuple):
    """Size of one process, in bytes."""

    pss: int
    file: int | None
    shared: int | None = None
    anon: int | None = None
    own: int | None = None
    swap: int | None = None


class ProcessTree:
    """Trainer and its descendants, such as the workers of a data loader.

    The size of a process is its proportional set size, so that memory shared by forked workers isn't
    counted again for each worker. If this size can't be read (macOS, Linux before 4.14, a process of
    another user), the resident set is used instead. The resident set counts shared pages in full.

    Processes whose command-line arguments are exactly ``leave_out`` are left out with all their descendants.
    They are memlog's helper processes, of this run and of others.
    """

    def __init__(
        self, pid: int, leave_out: Sequence[str] | None = None, *, proc: Path = Path("/proc")
    ) -> None:
        self._leave_out = None if leave_out is None else list(leave_out)
        self._proc = proc
        self._root: psutil.Process | None = None
        with suppress(psutil.Error):
            self._root = psutil.Process(pid)

    def read(self) -> TreeReading:
        """Read every process of the tree. This takes about 1 ms, and up to 4 ms for each large process."""
        sizes = {
            process: size
            for process in self._members()
            if (size := self._size(process)) is not None
        }
        if not sizes:
            return TreeReading(None, None)
        children = {process: size for process, size in sizes.items() if process != self._root}
        return TreeReading(
            sum(size.pss for size in sizes.values()),
            len(sizes),
            _total([size.file for size in sizes.values()]),
            self._readings(children),
            _total([size.shared for size in children.values()]),
            _total([size.swap for size in sizes.values()]) if self._has_swap() else None,
        )

    def _has_swap(self) -> bool:
        with suppress(OSError):
            _, found, rest = (self._proc / "meminfo").read_bytes().partition(b"SwapTotal:")
            return bool(found) and int(rest.split(maxsplit=1)[0]) > 0
        return False

    def _readings(self, children: dict[psutil.Process, _Size]) -> tuple[ChildReading, ...]:
        started = {process: process.create_time() for process in children}
        oldest = sorted(children, key=lambda process: (started[process], process.pid))
        roles = roles_of(oldest, self._proc)
        return tuple(
            ChildReading(role, process.pid, int(started[process] * 1e6), size.anon, size.own)
            for process, role in zip(oldest[:_MOST], roles, strict=False)
            for size in (children[process],)
        )

    def _members(self) -> list[psutil.Process]:
        if self._root is None:
            return []
        try:
            descendants = self._root.children(recursive=True)
        except psutil.Error:
            return []
        members, left_out = [self._root], set[int]()
        # Parents come before their children.
        for process in descendants:
            if self._is_left_out(process, left_out):
                left_out.add(process.pid)
            else:
                members.append(process)
        return members

    def _is_left_out(self, process: psutil.Process, left_out: set[int]) -> bool:
        with suppress(psutil.Error):
            return process.ppid() in left_out or process.cmdline()[1:] == self._leave_out
        return False

    def _size(self, process: psutil.Process) -> _Size | None:
        """Return the size of a process; ``None`` if the process has ended or is a zombie."""
        with suppress(OSError):
            return _proportional(self._proc / str(process.pid) / "smaps_rollup")
        with suppress(psutil.Error):
            rss = process.memory_info().rss
            return _Size(rss, None) if rss else None
        return None


def read_again(children: Sequence[ChildReading]) -> list[ChildReading]:
    """Return the children with their current anonymous memory. Leave out children that have ended.

    ``RssAnon`` in ``/proc/PID/status`` counts the same pages as `ProcessTree.read` does. Reading it takes
    0.05 ms for each process, because the kernel maintains this count. The other fields of each child, such as
    ``own``, keep their earlier values.
    """
    readings = []
    for child in children:
        with suppress(OSError):
            status = Path(f"/proc/{child.pid}/status").read_bytes()
            _, found, rest = status.partition(b"RssAnon:")
            if found:
                anon = int(rest.split(maxsplit=1)[0]) * _KIB
                readings.append(msgspec.structs.replace(child, anon=anon))
    return readings


def _total(sizes: Sequence[int | None]) -> int | None:
    """Return the sum of some sizes; ``None`` if one is unknown, or if there are none."""
    known = [size for size in sizes if size is not None]
    return sum(known) if known and len(known) == len(sizes) else None


def _proportional(rollup: Path) -> _Size | None:
    # The growth of one process is judged by all of its anonymous memory, not by its proportional size. The
    # proportional size of a forked child grows whenever its parent writes to a page that they share.
    names = b"Pss", b"Pss_File", b"Pss_Shmem", b"Anonymous", b"Private_Dirty", b"SwapPss"
    figures: dict[bytes, int] = {}
    for line in rollup.read_bytes().splitlines():
        name, _, rest = line.partition(b":")
        if name in names:
            figures[name] = int(rest.split()[0]) * _KIB
    pss, *others = map(figures.get, names)
    return None if pss is None else _Size(pss, *others)


_DATA_LOADER = "DataLoader worker"
_TORCH_WORKER = "pt_data_worker"
"""Name that torch gives the main thread of a DataLoader worker."""
_TOOLS = {
    "multiprocessing.resource_tracker": "multiprocessing's resource tracker",
    "multiprocessing.forkserver": "multiprocessing's fork server",
}
_SPAWNED = ("multiprocessing.spawn", "--multiprocessing-fork")


def roles_of(processes: Sequence[psutil.Process], proc: Path) -> list[str]:
    """Return the role of each process, from its name and command line.

    Several processes of the same kind get numbers from 0, in the order of ``processes``. A DataLoader worker
    gets a number even if it is the only one, because torch also numbers its workers, in the order of their
    start.
    """
    kinds = [_kind(process, proc) for process in processes]
    counts, next_number = Counter(kinds), Counter[str]()
    roles = []
    for kind in kinds:
        alone = counts[kind] == 1 and kind != _DATA_LOADER
        roles.append(kind if alone else f"{kind} {next_number[kind]}")
        next_number[kind] += 1
    return roles


def _kind(process: psutil.Process, proc: Path) -> str:
    with suppress(OSError):
        name = (proc / str(process.pid) / "comm").read_text(errors="replace").strip()
        if name == _TORCH_WORKER:
            return _DATA_LOADER
    with suppress(psutil.Error):
        command = process.cmdline()
        return _of_command(command, process.parent()) or process.name()
    return "child process"


def _of_command(command: Sequence[str], parent: psutil.Process | None) -> str | None:
    """Return the kind of a process according to its command line; ``None`` if the command line is empty."""
    line = " ".join(command)
    for module, name in _TOOLS.items():
        if module in line:
            return name
    if any(mark in line for mark in _SPAWNED):
        return "worker process"
    if not command:
        return None
    with suppress(psutil.Error):
        if parent is not None and parent.cmdline() == list(command):
            return "worker process"  # a fork has its parent's command line
    program = PurePath(command[0]).name
    if program.startswith("python") and len(command) > 1 and not command[1].startswith("-"):
        return PurePath(command[1]).name  # the script
    return program

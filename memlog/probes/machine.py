"""Memory of the machine, of the process's control group, and of the whole process tree."""

from __future__ import annotations

import sys
from collections import Counter
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path, PurePath, PurePosixPath
from typing import Any, NamedTuple

import msgspec
import psutil

from memlog.events import ChildReading

_MEMINFO = Path("/proc/meminfo")
_KIB = 1024


def available_memory() -> int | None:
    """Return the bytes that the machine can still give without swapping; ``None`` if unknown."""
    available, total = _figure(b"MemAvailable"), machine_memory()
    if available is None or total is None or not 0 <= available <= total:
        return _by_psutil("available")  # as for an old kernel, or in some containers
    return available


def machine_memory() -> int | None:
    """Return the machine's total memory, in bytes; ``None`` if unknown."""
    return _figure(b"MemTotal") or _by_psutil("total")


def memory_limit(cgroup_limit: int | None, machine: int | None) -> int | None:
    """Return the bytes that processes of a control group may use together; ``None`` if unknown.

    ``cgroup_limit`` is the smallest limit of the group and the groups above it, in bytes; ``None`` if none.
    ``machine`` is the total of the machine, in bytes; ``None`` if unknown.
    """
    return min((size for size in (cgroup_limit, machine) if size), default=None)


def _figure(name: bytes) -> int | None:
    """Return a figure of Linux's ``/proc/meminfo``, in bytes; ``None`` if it can't be read."""
    if sys.platform == "linux":
        with suppress(OSError, ValueError, IndexError):
            _, found, rest = (b"\n" + _MEMINFO.read_bytes()).partition(b"\n%b:" % name)
            return int(rest.split(None, 1)[0]) * _KIB if found else None
    return None


def _by_psutil(name: str) -> int | None:
    import psutil  # noqa: PLC0415 - takes 10 ms, and Linux rarely needs it

    with suppress(OSError, psutil.Error):
        return int(getattr(psutil.virtual_memory(), name))
    return None


_UNLIMITED = 2**60
"""Minimum number of bytes that counts as "no limit" (an exbibyte). Version 1 of control groups reports "no
limit" as a number near 2**63."""


class CgroupReading(NamedTuple):
    """Memory of a control group, in bytes."""

    used: int | None
    """Bytes in use, including page cache; ``None`` if unknown."""
    limit: int | None
    """Maximum bytes that the group may use; ``None`` if unknown or if there is no limit."""


class _Group(NamedTuple):
    """Control group that accounts for a process's memory, and the names of its files."""

    mount: Path
    path: PurePosixPath
    usage_file: str
    limit_file: str
    events_file: str


def read_cgroup(
    pid: int, *, root: Path = Path("/sys/fs/cgroup"), proc: Path = Path("/proc")
) -> CgroupReading:
    """Read the memory of a process's control group, version 1 or 2.

    Returns:
        Bytes used by the nearest group that accounts for memory, and the smallest limit of this
        group and of all visible groups above it. In a container, the topmost visible group is the
        container's own.
    """
    group = _memory_group(pid, root, proc)
    if group is None:
        return CgroupReading(None, None)
    folders = _folders(group)
    usages = _read_sizes(folders, group.usage_file)
    limits = _read_sizes(folders, group.limit_file)
    return CgroupReading(next(iter(usages), None), min(limits, default=None))


def read_file_pages(
    pid: int, *, root: Path = Path("/sys/fs/cgroup"), proc: Path = Path("/proc")
) -> int | None:
    """Return the bytes of file pages in the memory of a process's control group; ``None`` if unknown.

    The kernel frees these pages when it needs memory. The arguments are those of `read_cgroup`.

    Both versions of control groups list file pages as ``active_file`` and ``inactive_file``. The figures
    ``file`` and ``cache`` are not used, because they also include shared memory.
    """
    group = _memory_group(pid, root, proc)
    for folder in () if group is None else _folders(group):
        text = _read_text(folder / "memory.stat")
        if text is not None:
            figures = dict(line.split(" ", 1) for line in text.splitlines() if " " in line)
            sizes = [figures.get(f"{kind}_file", "") for kind in ("active", "inactive")]
            return sum(map(int, sizes)) if all(map(str.isdecimal, sizes)) else None
    return None


class OomKills:
    """Counter of the processes in a control group that the kernel kills for lack of memory.

    Create the counter while the process ``pid`` is alive: the group of an ended process can't be found.
    """

    def __init__(self, pid: int) -> None:
        group = _memory_group(pid, Path("/sys/fs/cgroup"), Path("/proc"))
        self._files: list[Path] = []
        if group is not None:
            # Nearest first. If the nearest group's file is missing, the next one is read: the kernel can
            # delete a group when its last process has ended.
            self._files = [folder / group.events_file for folder in _folders(group)]
        self._before = self._total()

    def count(self) -> int | None:
        """Return the number of kills since this object was created; ``None`` if unknown."""
        now = self._total()
        return None if now is None or self._before is None else max(now - self._before, 0)

    def _total(self) -> int | None:
        for file in self._files:
            for line in (_read_text(file) or "").splitlines():
                name, _, number = line.partition(" ")
                if name == "oom_kill" and number.strip().isdecimal():
                    return int(number)
        return None


def _memory_group(pid: int, root: Path, proc: Path) -> _Group | None:
    """Find a process's group in ``/proc/<pid>/cgroup``, whose lines are ``number:controllers:path``.

    A machine can mount both versions of control groups. Then memory belongs to version 1 if the file has a
    line for the controller ``memory``.
    """
    paths = {}
    for line in (_read_text(proc / str(pid) / "cgroup") or "").splitlines():
        _, controllers, path = line.split(":", 2)
        paths.update(dict.fromkeys(controllers.split(","), PurePosixPath(path)))
    if "memory" in paths:
        v1 = "memory.usage_in_bytes", "memory.limit_in_bytes", "memory.oom_control"
        return _Group(root / "memory", paths["memory"], *v1)
    if "" in paths:
        return _Group(root, paths[""], "memory.current", "memory.max", "memory.events")
    return None


def _folders(group: _Group) -> list[Path]:
    """Return the group's folder and the folders above it, nearest first. ``group.mount`` is the last.

    Inside a container, the group's path can be a path on the host. Then only ``group.mount`` exists, and is
    the folder of the container's own group. If the path contains ``..``, return only ``group.mount``.
    """
    parts = group.path.parts[1:]
    if ".." in parts:
        return [group.mount]
    return [group.mount.joinpath(*parts[:depth]) for depth in range(len(parts), -1, -1)]


def _read_sizes(folders: list[Path], name: str) -> list[int]:
    """Return the bytes that the files ``name`` contain. Skip missing files and files that mean "no limit"."""
    texts = [(_read_text(folder / name) or "").strip() for folder in folders]
    sizes = [int(text) for text in texts if text.isdecimal()]
    return [size for size in sizes if size < _UNLIMITED]


def _read_text(path: Path) -> str | None:
    with suppress(OSError):
        return path.read_text(encoding="utf-8", errors="replace")
    return None


def host_free(pid: int) -> int | None:
    """Return the bytes that a process can still take; ``None`` if unknown.

    These are the free bytes of the process's control group or of the machine, whichever are fewer. File pages
    count as free, because the kernel frees file pages when it needs memory. A call takes about a millisecond.
    """
    known = [free for free in (_cgroup_free(pid), available_memory()) if free is not None]
    return min(known, default=None)


def device_free(name: str) -> int | None:
    """Return the bytes that are free on a device, such as ``cuda0``; ``None`` if unknown.

    If the device shares the host's memory, these are the bytes that the machine can still give. The driver's
    figure lacks the file pages that the kernel frees when it needs memory.
    """
    kind = name.rstrip("0123456789")
    try:
        torch, index = sys.modules["torch"], int(name[len(kind) :])
        if shares_host(torch, kind, index):
            return available_memory()
        return int(getattr(torch, kind).mem_get_info(index)[0])
    except Exception:  # noqa: BLE001 - a device that can't be read must not end training
        return None


def shares_host(torch: Any, kind: str, index: int) -> bool:
    """Return True if a device has no memory of its own, but uses the host's.

    So do GB10, Jetson, and Apple's GPUs. GH200 and GB200 have memory of their own. AMD's integrated devices
    don't count, because they can have a part of the memory that the host's figures lack.

    Raises:
        Exception: As torch raises for a device that it does not know.
    """
    if kind == "mps":
        return True
    if kind != "cuda" or torch.version.hip:
        return False
    return bool(torch.cuda.get_device_properties(index).is_integrated)


def _cgroup_free(pid: int) -> int | None:
    group = read_cgroup(pid)
    if group.used is None or group.limit is None:
        return None
    return max(group.limit - group.used + (read_file_pages(pid) or 0), 0)


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

"""Memory of the machine and of the process's control group, and what the process can still take."""

from __future__ import annotations

import sys
from contextlib import suppress
from pathlib import Path, PurePosixPath
from typing import Any, NamedTuple

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

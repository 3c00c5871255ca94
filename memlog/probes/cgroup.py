"""Memory use, memory limit and out-of-memory kills of a process's control group, such as a container's."""

from __future__ import annotations

from contextlib import suppress
from pathlib import Path, PurePosixPath
from typing import NamedTuple

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

"""What a process's control group uses and may use: in a container, the memory that counts."""

from __future__ import annotations

from contextlib import suppress
from pathlib import Path, PurePosixPath
from typing import NamedTuple

_UNLIMITED = 2**60
"""Version 1 says "no limit" with a number near 2**63; no machine has an exbibyte."""


class CgroupReading(NamedTuple):
    """A control group's memory, in bytes."""

    used: int | None
    """Page cache included, as the kernel counts; ``None`` where unknown."""
    limit: int | None
    """``None`` where unknown or where there is none."""


class _Group(NamedTuple):
    """Where a process's memory is accounted, and in which files."""

    mount: Path
    path: PurePosixPath
    usage_file: str
    limit_file: str
    events_file: str


def read_cgroup(
    pid: int, *, root: Path = Path("/sys/fs/cgroup"), proc: Path = Path("/proc")
) -> CgroupReading:
    """Reads the memory of a process's control group, version 1 or 2.

    Args:
        pid: The process.
        root: Where control groups are mounted.
        proc: Where processes are.

    Returns:
        The use of the nearest group that accounts for memory, and the smallest limit from there up
        to the root of what is visible: a container sees its own group as that root.
    """
    membership = _read_text(proc / str(pid) / "cgroup")
    group = None if membership is None else _memory_group(membership, root)
    if group is None:
        return CgroupReading(None, None)
    folders = _folders(group)
    usages = _read_sizes(folders, group.usage_file)
    limits = _read_sizes(folders, group.limit_file)
    return CgroupReading(next(iter(usages), None), min(limits, default=None))


class OomKills:
    """Counts the processes that the kernel kills for memory in a process's control group, from now on.

    Made while the process lives: afterwards nothing tells which group was its.

    Args:
        pid: The process.
        root: Where control groups are mounted.
        proc: Where processes are.
    """

    def __init__(
        self, pid: int, *, root: Path = Path("/sys/fs/cgroup"), proc: Path = Path("/proc")
    ) -> None:
        membership = _read_text(proc / str(pid) / "cgroup")
        group = None if membership is None else _memory_group(membership, root)
        self._files: list[Path] = []
        if group is not None:
            # Nearest first; the deeper group may be gone with its last process.
            self._files = [folder / group.events_file for folder in _folders(group)]
        self._before = self._total()

    def count(self) -> int | None:
        """How many there were since this was made; ``None`` where the kernel does not say."""
        now = self._total()
        return None if now is None or self._before is None else max(now - self._before, 0)

    def _total(self) -> int | None:
        for file in self._files:
            for line in (_read_text(file) or "").splitlines():
                name, _, number = line.partition(" ")
                if name == "oom_kill" and number.strip().isdecimal():
                    return int(number)
        return None


def _memory_group(membership: str, root: Path) -> _Group | None:
    """Finds the group in ``/proc/<pid>/cgroup``, whose lines are ``number:controllers:path``.

    On a machine that mounts both versions, memory belongs to version 1 if that has a line for it.
    """
    paths = {}
    for line in membership.splitlines():
        _, controllers, path = line.split(":", 2)
        paths.update(dict.fromkeys(controllers.split(","), PurePosixPath(path)))
    if "memory" in paths:
        v1 = "memory.usage_in_bytes", "memory.limit_in_bytes", "memory.oom_control"
        return _Group(root / "memory", paths["memory"], *v1)
    if "" in paths:
        return _Group(root, paths[""], "memory.current", "memory.max", "memory.events")
    return None


def _folders(group: _Group) -> list[Path]:
    """The group's folder and those above it, nearest first.

    Inside a container the path may be the host's, of which only the mount itself exists here, or
    may lead out of the namespace with ``..``; the mount is the container's own group then.
    """
    parts = group.path.parts[1:]
    if ".." in parts:
        return [group.mount]
    return [group.mount.joinpath(*parts[:depth]) for depth in range(len(parts), -1, -1)]


def _read_sizes(folders: list[Path], name: str) -> list[int]:
    """The numbers in the files of that name, without those that are missing or say "no limit"."""
    texts = [(_read_text(folder / name) or "").strip() for folder in folders]
    sizes = [int(text) for text in texts if text.isdecimal()]
    return [size for size in sizes if size < _UNLIMITED]


def _read_text(path: Path) -> str | None:
    with suppress(OSError):
        return path.read_text(encoding="utf-8", errors="replace")
    return None

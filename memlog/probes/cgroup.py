"""Memory use and limit of a process's control group, which is what counts in a container."""

from __future__ import annotations

from contextlib import suppress
from pathlib import Path, PurePosixPath
from typing import NamedTuple

_UNLIMITED = 2**60
"""Version 1 represents "no limit" by a number near 2**63. No machine has an exbibyte."""


class CgroupReading(NamedTuple):
    """Memory of a control group, in bytes."""

    used: int | None
    """Bytes in use, including page cache, as the kernel counts; ``None`` if unknown."""
    limit: int | None
    """Most bytes that the group may use; ``None`` if unknown or if there is no limit."""


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
        Use of the nearest group that accounts for memory, and the smallest limit from there up to the
        visible root. A container sees its own group as that root.
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
    """Return the bytes of files in the memory of a process's control group; ``None`` if unknown.

    The kernel takes them back when it needs memory. The arguments are those of `read_cgroup`.
    """
    group = _memory_group(pid, root, proc)
    return None if group is None else _file_pages(_folders(group))


class OomKills:
    """Counter of the processes in a control group that the kernel kills because of memory.

    Create it while the process ``pid`` of the group is alive, because its group is unknown afterwards.
    """

    def __init__(self, pid: int) -> None:
        group = _memory_group(pid, Path("/sys/fs/cgroup"), Path("/proc"))
        self._files: list[Path] = []
        if group is not None:
            # Nearest first; the kernel may delete the deepest group with its last process.
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

    On a machine that mounts both versions, memory belongs to version 1 if version 1 has a line for it.
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
    """Return the group's folder and those above it, nearest first.

    Inside a container the path may be the host's, of which only the mount itself exists here, or
    it may leave the namespace with ``..``. In both cases the mount is the container's own group.
    """
    parts = group.path.parts[1:]
    if ".." in parts:
        return [group.mount]
    return [group.mount.joinpath(*parts[:depth]) for depth in range(len(parts), -1, -1)]


def _read_sizes(folders: list[Path], name: str) -> list[int]:
    """Return the numbers in the files of that name, without those that are missing or mean "no limit"."""
    texts = [(_read_text(folder / name) or "").strip() for folder in folders]
    sizes = [int(text) for text in texts if text.isdecimal()]
    return [size for size in sizes if size < _UNLIMITED]


def _file_pages(folders: list[Path]) -> int | None:
    """Return the bytes of files in the nearest group's memory.

    Both versions list these as active and inactive. Their ``file`` and ``cache`` also include shared memory.
    """
    for folder in folders:
        text = _read_text(folder / "memory.stat")
        if text is not None:
            figures = dict(line.split(" ", 1) for line in text.splitlines() if " " in line)
            sizes = [figures.get(f"{kind}_file", "") for kind in ("active", "inactive")]
            return sum(map(int, sizes)) if all(map(str.isdecimal, sizes)) else None
    return None


def _read_text(path: Path) -> str | None:
    with suppress(OSError):
        return path.read_text(encoding="utf-8", errors="replace")
    return None

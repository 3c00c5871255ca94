"""What the host could still have given this process, and what sets the limit."""

from __future__ import annotations

import os
import resource
from contextlib import suppress
from pathlib import Path
from typing import NamedTuple

from memlog.probes.cgroup import read_cgroup
from memlog.probes.tree import available_memory


class Room(NamedTuple):
    """Bytes, ``None`` where unknown."""

    used: int | None
    free: int | None
    limit: int | None
    limited_by: str | None


def host_room() -> Room:
    """The tightest of: the process's address space, its control group, the machine."""
    rooms = [room for room in (_address_space(), _cgroup(), _machine()) if room.free is not None]
    return min(rooms, key=lambda room: room.free or 0, default=Room(None, None, None, None))


def _address_space() -> Room:
    limit, _ = resource.getrlimit(resource.RLIMIT_AS)
    used = None
    with suppress(OSError, ValueError, IndexError):
        pages = int(Path("/proc/self/statm").read_bytes().split()[0])
        used = pages * os.sysconf("SC_PAGE_SIZE")
    if limit == resource.RLIM_INFINITY or used is None:
        return Room(used, None, None, None)
    return Room(
        used, max(limit - used, 0), limit, "the limit on the process's address space (ulimit -v)"
    )


def _cgroup() -> Room:
    reading = read_cgroup(os.getpid())
    if reading.used is None or reading.limit is None:
        return Room(reading.used, None, None, None)
    free = max(reading.limit - reading.used, 0)
    return Room(reading.used, free, reading.limit, "the memory limit of the container (cgroup)")


def _machine() -> Room:
    free = available_memory()
    if free is None:
        return Room(None, None, None, None)
    import psutil  # noqa: PLC0415 - for a machine that runs out, once

    total = int(psutil.virtual_memory().total)
    return Room(total - free, free, total, "the machine's memory")

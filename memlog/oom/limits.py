"""What the host could still have given this process when it ran out, and what sets the limit.

An exception is heard of after the stack has unwound and what it held was given back: what is free then was
not free when it counted. What the kernel keeps of the process's highest moment tells of that: the failed
allocation came on top of no more than it.
"""

from __future__ import annotations

import os
import resource
from contextlib import suppress
from pathlib import Path
from typing import NamedTuple

from memlog.probes.cgroup import read_cgroup
from memlog.probes.tree import available_memory

_KIB = 1024


class Room(NamedTuple):
    """Bytes, ``None`` where unknown."""

    used: int | None
    """At the process's highest moment."""
    free: int | None
    """At that moment."""
    free_after: int | None
    """Now, when what the failed step held is given back."""
    limit: int | None
    limited_by: str | None


NO_ROOM = Room(None, None, None, None, None)


def host_room() -> Room:
    """The tightest of: the process's address space, its control group, the machine."""
    memory = _own_memory()
    rooms = [_address_space(memory), _cgroup(memory), _machine(memory)]
    known = [room for room in rooms if room.limit is not None]
    return min(known, key=lambda room: room.free or 0, default=NO_ROOM)


def highest_resident() -> int | None:
    """The most memory that this process ever had resident, in bytes; ``None`` if unknown."""
    return _own_memory().get("VmHWM")


def _own_memory() -> dict[str, int]:
    """The kernel's figures of this process, such as ``VmPeak``, in bytes."""
    figures: dict[str, int] = {}
    with suppress(OSError, ValueError):
        for line in Path("/proc/self/status").read_text(encoding="ascii").splitlines():
            name, _, rest = line.partition(":")
            if name.startswith("Vm"):
                figures[name] = int(rest.split()[0]) * _KIB
    return figures


def _address_space(memory: dict[str, int]) -> Room:
    limit, _ = resource.getrlimit(resource.RLIMIT_AS)
    used, peak = memory.get("VmSize"), memory.get("VmPeak")
    if limit == resource.RLIM_INFINITY or used is None or peak is None:
        return NO_ROOM
    name = "the limit on the process's address space (ulimit -v)"
    after = max(limit - used, 0)
    if peak > limit:  # it was lowered since: how high the process stood under it is not known
        return Room(None, None, after, limit, name)
    return Room(peak, limit - peak, after, limit, name)


def _cgroup(memory: dict[str, int]) -> Room:
    reading = read_cgroup(os.getpid())
    if reading.used is None or reading.limit is None:
        return NO_ROOM
    name = "the memory limit of the container (cgroup)"
    return _of_pages(reading.used, reading.limit, memory, name)


def _machine(memory: dict[str, int]) -> Room:
    free = available_memory()
    if free is None:
        return NO_ROOM
    total = machine_memory()
    if total is None:
        return NO_ROOM
    return _of_pages(total - free, total, memory, "the machine's memory")


def machine_memory() -> int | None:
    """All the memory that the machine has, in bytes; ``None`` where unknown."""
    import psutil  # noqa: PLC0415 - for a process that runs out, once

    with suppress(OSError, psutil.Error):
        return int(psutil.virtual_memory().total)
    return None


def _of_pages(used: int, limit: int, memory: dict[str, int], name: str) -> Room:
    """Of others' memory nothing is known but its level now; this process's own was higher by so much."""
    given_back = max(memory.get("VmHWM", 0) - memory.get("VmRSS", 0), 0)
    after = max(limit - used, 0)
    highest = min(used + given_back, limit)
    return Room(highest, limit - highest, after, limit, name)

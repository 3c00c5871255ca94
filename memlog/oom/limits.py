"""Memory that was free on the host when an allocation failed, and the limit that applied.

memlog gets an exception only after the stack has unwound and the step's memory was released. At that time,
more memory is free than at the failure. So memlog reads the highest memory use of the process, which the
kernel records. The use at the failure was at most this highest use.
"""

from __future__ import annotations

import os
import resource
from contextlib import suppress
from pathlib import Path
from typing import NamedTuple

from memlog.probes.cgroup import read_cgroup
from memlog.probes.machine import available_memory, machine_memory

_KIB = 1024


class Headroom(NamedTuple):
    """Used and free memory under one limit, in bytes; ``None`` if unknown."""

    used: int | None
    """Bytes in use by all processes under the limit when this process's memory use was highest."""
    free: int | None
    """Bytes that were free at the time of this process's highest memory use."""
    free_after: int | None
    """Bytes that were free after the failed step's memory was released."""
    limit: int | None
    limited_by: str | None


UNKNOWN_HEADROOM = Headroom(None, None, None, None, None)


def host_headroom() -> Headroom:
    """Return the headroom with the fewest free bytes.

    The candidates are the headrooms of the process's address space, of its control group, and of the machine.
    """
    memory = _own_memory()
    headrooms = [_address_space(memory), _cgroup(memory), _machine(memory)]
    known = [headroom for headroom in headrooms if headroom.limit is not None]
    return min(known, key=lambda headroom: headroom.free or 0, default=UNKNOWN_HEADROOM)


def highest_resident() -> int | None:
    """Return the largest resident set size of this process so far, in bytes; ``None`` if unknown."""
    return _own_memory().get("VmHWM")


def _own_memory() -> dict[str, int]:
    """Return the kernel's figures of this process, such as ``VmPeak``, in bytes."""
    figures: dict[str, int] = {}
    with suppress(OSError, ValueError):
        for line in Path("/proc/self/status").read_text(encoding="ascii").splitlines():
            name, _, rest = line.partition(":")
            if name.startswith("Vm"):
                figures[name] = int(rest.split()[0]) * _KIB
    return figures


def _address_space(memory: dict[str, int]) -> Headroom:
    limit, _ = resource.getrlimit(resource.RLIMIT_AS)
    used, peak = memory.get("VmSize"), memory.get("VmPeak")
    if limit == resource.RLIM_INFINITY or used is None or peak is None:
        return UNKNOWN_HEADROOM
    name = "the limit on the process's address space (ulimit -v)"
    after = max(limit - used, 0)
    if peak > limit:  # the limit was lowered later; the highest use since then is unknown
        return Headroom(None, None, after, limit, name)
    return Headroom(peak, limit - peak, after, limit, name)


def _cgroup(memory: dict[str, int]) -> Headroom:
    reading = read_cgroup(os.getpid())
    if reading.used is None or reading.limit is None:
        return UNKNOWN_HEADROOM
    name = "the memory limit of the container (cgroup)"
    return _of_pages(reading.used, reading.limit, memory, name)


def _machine(memory: dict[str, int]) -> Headroom:
    free, total = available_memory(), machine_memory()
    if free is None or total is None:
        return UNKNOWN_HEADROOM
    return _of_pages(total - free, total, memory, "the machine's memory")


def _of_pages(used: int, limit: int, memory: dict[str, int], name: str) -> Headroom:
    """Return the headroom under a limit that other processes share.

    The kernel does not record the highest use by all processes together. memlog estimates it: the current use
    by all processes, plus the difference between this process's largest and current resident set size.
    """
    given_back = max(memory.get("VmHWM", 0) - memory.get("VmRSS", 0), 0)
    after = max(limit - used, 0)
    highest = min(used + given_back, limit)
    return Headroom(highest, limit - highest, after, limit, name)

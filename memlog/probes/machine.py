"""Memory of the whole machine."""

from __future__ import annotations

import sys
from contextlib import suppress
from pathlib import Path

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

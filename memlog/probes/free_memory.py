"""Bytes of memory that a process can still take."""

from __future__ import annotations

import sys

from memlog.probes.cgroup import read_cgroup, read_file_pages
from memlog.probes.machine import available_memory


def host_free(pid: int) -> int | None:
    """Return the bytes that a process can still take; ``None`` if unknown.

    These are the free bytes of the process's control group or of the machine, whichever are fewer. File pages
    count as free, because the kernel frees file pages when it needs memory. A call takes about a millisecond.
    """
    known = [free for free in (_cgroup_free(pid), available_memory()) if free is not None]
    return min(known, default=None)


def device_free(name: str) -> int | None:
    """Return the bytes that are free on a device, such as ``cuda0``; ``None`` if unknown."""
    kind = name.rstrip("0123456789")
    try:
        module = getattr(sys.modules["torch"], kind)
        return int(module.mem_get_info(int(name[len(kind) :]))[0])
    except Exception:  # noqa: BLE001 - a device that can't be read must not end training
        return None


def _cgroup_free(pid: int) -> int | None:
    group = read_cgroup(pid)
    if group.used is None or group.limit is None:
        return None
    return max(group.limit - group.used + (read_file_pages(pid) or 0), 0)

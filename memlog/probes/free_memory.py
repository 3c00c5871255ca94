"""Bytes of memory that a process can still take."""

from __future__ import annotations

import sys
from typing import Any

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

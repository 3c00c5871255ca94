"""Host memory to which ``%`` in a rule refers."""

from __future__ import annotations

from memlog.probes.cgroup import read_cgroup
from memlog.probes.tree import machine_memory, memory_limit


def host_limit(pid: int) -> int | None:
    """Return the bytes that a process and the processes that share its limits may use together.

    Returns:
        The machine's memory or the smallest limit of the process's control groups, whichever is smaller;
        ``None`` if both are unknown.
    """
    return memory_limit(read_cgroup(pid).limit, machine_memory())

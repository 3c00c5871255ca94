"""Host memory to which ``%`` in a rule refers."""

from __future__ import annotations

from memlog.probes.cgroup import read_cgroup
from memlog.probes.tree import machine_memory, memory_limit


def host_limit(pid: int) -> int | None:
    """Return the bytes that a process and the processes that share its limits may use together.

    Returns:
        The smallest limit of its control groups, or the machine's memory if that is less or if there is no
        limit; ``None`` if neither is known.
    """
    return memory_limit(read_cgroup(pid).limit, machine_memory())

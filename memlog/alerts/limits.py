"""Host memory to which ``%`` in a rule refers."""

from __future__ import annotations

from contextlib import suppress

from memlog.probes.cgroup import read_cgroup


def host_limit(pid: int) -> int | None:
    """Return the bytes that a process may use, together with the processes that share its limits.

    Returns:
        The smallest limit of its control groups, or the machine's memory if that is less or if there is no
        limit; ``None`` if neither is known.
    """
    known = [size for size in (read_cgroup(pid).limit, _machine_memory()) if size]
    return min(known, default=None)


def _machine_memory() -> int | None:
    # Imported here because only rules with a share need it, and the import would slow down `memlog.init`.
    import psutil  # noqa: PLC0415

    with suppress(OSError, psutil.Error):
        return int(psutil.virtual_memory().total)
    return None

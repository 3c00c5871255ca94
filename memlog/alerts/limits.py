"""What a share of the host's memory is a share of."""

from __future__ import annotations

from contextlib import suppress

from memlog.probes.cgroup import read_cgroup


def host_limit(pid: int) -> int | None:
    """Bytes that a process may use at most, together with those that share its limits.

    Returns:
        The smallest limit of its control groups, or the machine's memory where that is less or there is
        none; ``None`` where neither is known.
    """
    known = [size for size in (read_cgroup(pid).limit, _machine_memory()) if size]
    return min(known, default=None)


def _machine_memory() -> int | None:
    # Imported here: only rules with a share need it, and `memlog.init` stays quick without.
    import psutil  # noqa: PLC0415

    with suppress(OSError, psutil.Error):
        return int(psutil.virtual_memory().total)
    return None

"""Identify the process that wrote a journal, to detect that it has ended."""

from __future__ import annotations

import os
import sys
from contextlib import suppress
from pathlib import Path
from typing import NamedTuple

_STATE = 0
_START = 19
"""Indices of field 3 (`_STATE`) and field 22 (`_START`) of ``/proc/PID/stat``, see proc_pid_stat(5). The
first field after the program's name has index 0."""
_DEAD = frozenset("ZXx")
"""States of a dead process. A zombie counts as dead, too."""


class Birth(NamedTuple):
    """Start of a process, which distinguishes it from a later process with the same pid.

    The fields do not depend on the wall clock. Linux only; on other systems every field is ``None``.
    """

    boot: str | None = None
    """Id of the machine's boot."""
    ticks: int | None = None
    """Clock ticks from the boot to the process's start."""


def birth_of(pid: int) -> Birth:
    """Return the start of a process; unknown fields are ``None``.

    Raises:
        ProcessLookupError: No process has this pid, or the process is dead.
        PermissionError: This user may not read the process's start.
    """
    if not sys.platform.startswith("linux"):
        return Birth()
    try:
        stat = Path("/proc", str(pid), "stat").read_text(encoding="utf-8", errors="replace")
    except FileNotFoundError as error:
        raise ProcessLookupError(*error.args) from None
    fields = stat.rpartition(")")[2].split()
    if fields[_STATE] in _DEAD:
        raise ProcessLookupError(f"process {pid} is dead")
    try:
        boot = Path("/proc/sys/kernel/random/boot_id").read_text(encoding="ascii").strip()
    except FileNotFoundError as error:
        # This /proc shows only processes, for example because systemd mounted it with ProcSubset=pid.
        raise PermissionError(str(error)) from error
    return Birth(boot, int(fields[_START]))


def own_birth() -> Birth:
    """Return the start of the calling process; every field is ``None`` if ``/proc`` can't be read."""
    try:
        return birth_of(os.getpid())
    except OSError:
        return Birth()


def own_start(birth: Birth) -> float:
    """Return the start of the calling process by the system's clock, Unix time in seconds."""
    if birth.ticks is not None:
        with suppress(OSError, ValueError, IndexError):
            _, found, rest = Path("/proc/stat").read_bytes().partition(b"\nbtime ")
            if found:
                booted = int(rest.split(None, 1)[0])
                return booted + birth.ticks / os.sysconf("SC_CLK_TCK")
    import psutil  # noqa: PLC0415 - takes 10 ms, and Linux rarely needs it

    return psutil.Process().create_time()

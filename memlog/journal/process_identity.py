"""Identify the process that wrote a journal, to detect that it ended or runs another program now."""

from __future__ import annotations

import hashlib
import os
import sys
from pathlib import Path
from typing import NamedTuple

_STATE = 0
_START = 19
"""Indices in ``/proc/PID/stat``, after the program's name (proc_pid_stat(5), fields 3 and 22)."""
_DEAD = frozenset("ZXx")
"""States of a dead process, including one that its parent has not waited for."""
_MAX_VECTOR = 4096


class Birth(NamedTuple):
    """Start and program of a process: distinguishes it from a later one with the same pid.

    A change of the wall clock changes none of it. Linux only; elsewhere every field is ``None``.
    """

    boot: str | None = None
    """Id of the machine's boot."""
    ticks: int | None = None
    """Clock ticks from the boot to the process's start."""
    program: str | None = None
    """Digest of the addresses at which the kernel loaded the program. The kernel draws them at random, so
    each ``exec`` changes it. ``None`` also for other users' processes."""


def birth_of(pid: int) -> Birth:
    """Return the start and the program of a process; unknown fields are ``None``.

    Raises:
        ProcessLookupError: No process has this pid, or it is dead.
        PermissionError: This user may not read it.
    """
    if not sys.platform.startswith("linux"):
        return Birth()
    folder = Path("/proc", str(pid))
    try:
        stat = (folder / "stat").read_text(encoding="utf-8", errors="replace")
    except FileNotFoundError as error:
        raise ProcessLookupError(*error.args) from None
    fields = stat.rpartition(")")[2].split()
    if fields[_STATE] in _DEAD:
        raise ProcessLookupError(f"process {pid} is dead")
    return Birth(_boot(), int(fields[_START]), _program(folder))


def own_birth() -> Birth:
    """Return the start and the program of the calling process; no field is set if ``/proc`` can't be read."""
    try:
        birth = birth_of(os.getpid())
    except (OSError, ValueError, IndexError):
        return Birth()
    return birth if birth.boot is not None else Birth()


def _boot() -> str | None:
    try:
        return Path("/proc/sys/kernel/random/boot_id").read_text(encoding="ascii").strip() or None
    except (OSError, UnicodeDecodeError):
        return None


def _program(folder: Path) -> str | None:
    """Return a digest of the auxiliary vector (getauxval(3)).

    It holds addresses that the kernel draws at random when it loads a program.
    """
    try:
        with (folder / "auxv").open("rb") as file:
            vector = file.read(_MAX_VECTOR)
    except OSError:
        return None
    return hashlib.blake2s(vector, digest_size=8).hexdigest() if vector else None

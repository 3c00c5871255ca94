"""Whether the process that wrote a journal still lives, and still runs the same program."""

from __future__ import annotations

import hashlib
import os
import sys
from pathlib import Path
from typing import NamedTuple

_STATE = 0
_START = 19
"""Where they stand in ``/proc/PID/stat``, after the program's name (proc_pid_stat(5), fields 3 and 22)."""
_GONE = frozenset("ZXx")
"""States of a process that is dead, and perhaps not collected yet."""
_MAX_VECTOR = 4096


class Birth(NamedTuple):
    """What tells a process from a later one with the same number, whatever becomes of the wall clock.

    Linux only; elsewhere every part is ``None``.
    """

    boot: str | None = None
    """Id of the machine's boot."""
    ticks: int | None = None
    """Clock ticks between that and the process's start."""
    program: str | None = None
    """A digest of where the kernel put its program in memory, which is drawn anew by each ``exec``; ``None``
    also for other users' processes."""


def birth_of(pid: int) -> Birth:
    """What the kernel says of a process; what it does not say is ``None``.

    Raises:
        ProcessLookupError: there is none with that number, or it is dead.
        PermissionError: the kernel does not tell this user.
    """
    if not sys.platform.startswith("linux"):
        return Birth()
    folder = Path("/proc", str(pid))
    try:
        stat = (folder / "stat").read_text(encoding="utf-8", errors="replace")
    except FileNotFoundError as error:
        raise ProcessLookupError(*error.args) from None
    fields = stat.rpartition(")")[2].split()
    if fields[_STATE] in _GONE:
        raise ProcessLookupError(f"process {pid} is dead")
    return Birth(_boot(), int(fields[_START]), _program(folder))


def own_birth() -> Birth:
    """The calling process's; nothing where ``/proc`` is not as it should be."""
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
    """The auxiliary vector holds addresses that the kernel draws when it loads a program (getauxval(3))."""
    try:
        with (folder / "auxv").open("rb") as file:
            vector = file.read(_MAX_VECTOR)
    except OSError:
        return None
    return hashlib.blake2s(vector, digest_size=8).hexdigest() if vector else None

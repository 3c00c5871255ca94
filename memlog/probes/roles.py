"""Roles of the trainer's child processes, such as ``DataLoader worker 3``."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path, PurePath

import psutil

_DATA_LOADER = "DataLoader worker"
_TORCH_WORKER = "pt_data_worker"
"""Name that torch gives the main thread of a DataLoader worker."""
_TOOLS = {
    "multiprocessing.resource_tracker": "multiprocessing's resource tracker",
    "multiprocessing.forkserver": "multiprocessing's fork server",
}
_SPAWNED = ("multiprocessing.spawn", "--multiprocessing-fork")


def roles_of(processes: Sequence[psutil.Process], proc: Path) -> list[str]:
    """Return the role of each process, from its name and command line.

    Several processes of the same kind get numbers from 0, in the order of ``processes``. A DataLoader worker
    gets a number even if it is the only one, because torch also numbers its workers, in the order of their
    start.
    """
    kinds = [_kind(process, proc) for process in processes]
    counts, next_number = Counter(kinds), Counter[str]()
    roles = []
    for kind in kinds:
        alone = counts[kind] == 1 and kind != _DATA_LOADER
        roles.append(kind if alone else f"{kind} {next_number[kind]}")
        next_number[kind] += 1
    return roles


def _kind(process: psutil.Process, proc: Path) -> str:
    with suppress(OSError):
        name = (proc / str(process.pid) / "comm").read_text(errors="replace").strip()
        if name == _TORCH_WORKER:
            return _DATA_LOADER
    with suppress(psutil.Error):
        command = process.cmdline()
        return _of_command(command, process.parent()) or process.name()
    return "child process"


def _of_command(command: Sequence[str], parent: psutil.Process | None) -> str | None:
    """Return the kind of a process according to its command line; ``None`` if the command line is empty."""
    line = " ".join(command)
    for module, name in _TOOLS.items():
        if module in line:
            return name
    if any(mark in line for mark in _SPAWNED):
        return "worker process"
    if not command:
        return None
    with suppress(psutil.Error):
        if parent is not None and parent.cmdline() == list(command):
            return "worker process"  # a fork has its parent's command line
    program = PurePath(command[0]).name
    if program.startswith("python") and len(command) > 1 and not command[1].startswith("-"):
        return PurePath(command[1]).name  # the script
    return program

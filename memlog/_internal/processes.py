"""This process among others: forks of it, and its rank among the processes that train together.

A comparison of process ids would cost a system call at each step. Instead, Python calls a function of this
module in each child, and the function increases the number.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Mapping
from contextlib import suppress
from typing import NamedTuple
from weakref import WeakKeyDictionary

import msgspec

from memlog._internal.secret_names import lazy_pattern

generation = 0
"""Number of forks between the first process and this one.

An object can store this number to detect a fork later. In the child process, the number is larger.
"""
has_children = False
"""True if this process has forked since this module was loaded."""

_locks: WeakKeyDictionary[object, dict[str, Callable[[], object]]] = WeakKeyDictionary()
"""Locks by owner and attribute name. Each value is the function that creates a new lock."""


def _forked() -> None:
    global generation, has_children  # noqa: PLW0603 - other modules read them
    generation += 1
    has_children = False
    for owner, locks in list(_locks.items()):
        for attribute, make in locks.items():
            setattr(owner, attribute, make())


def renew(owner: object, attribute: str, make: Callable[[], object]) -> None:
    """Replace a lock by a new lock in every child process that a fork creates.

    A fork also copies locks that other threads hold. No thread of the child could release these copies.
    ``owner`` is the module or object that has the lock. memlog does not keep the owner alive. ``attribute``
    is the lock's name in ``owner``. ``make`` creates the new lock.
    """
    _locks.setdefault(owner, {})[attribute] = make


def _has_forked() -> None:
    global has_children  # noqa: PLW0603 - other modules read it
    has_children = True


os.register_at_fork(after_in_parent=_has_forked, after_in_child=_forked)


class Descriptor:
    """A file descriptor of memlog. `close` never closes another file that has got the same number.

    A program that becomes a daemon forks and closes every descriptor. The system may then give the same
    number to a file of the program.

    The object takes over ``number``, an open descriptor. After `close`, ``number`` is -1.
    """

    def __init__(self, number: int) -> None:
        self.number = number
        self._opened = [os.fstat(number)]
        """The file's status when it was opened; empty after `close`."""

    def status(self) -> os.stat_result | None:
        """Return the file's status; ``None`` if ``number`` no longer refers to the file."""
        try:
            status = os.fstat(self.number)
        except OSError:
            return None
        return status if any(os.path.samestat(status, opened) for opened in self._opened) else None

    def close(self) -> None:
        """Close the file if ``number`` still refers to it. A second call is harmless, also from a thread."""
        try:
            opened = self._opened.pop()  # by one thread only
        except IndexError:
            return
        with suppress(OSError):
            if os.path.samestat(os.fstat(self.number), opened):
                os.close(self.number)
        self.number = -1

    def __del__(self) -> None:
        """Close the file if `close` was not called, for example because of an interruption."""
        self.close()


_NO_ID = "none"
"""torchrun's default id of a training."""
_BATCH_STEP = 4_000_000_000
"""Lowest id of a step that SLURM itself starts, such as the batch script. The processes of such a step are no
ranks."""
_LOOPBACK = frozenset({"127.0.0.1", "localhost", "::1"})
_KUBEFLOW_POD = lazy_pattern(r"(?P<job>.+)-(?:master|worker)-\d+")


class RankPosition(msgspec.Struct, frozen=True):
    """Position of a process among the ranks of one training."""

    rank: int
    world_size: int
    job: str
    """Text that the processes of one training have in common. A later training may have the same text."""
    local_rank: int | None = None
    """Number of the process on its machine; ``None``: unknown."""
    restart: int = 0
    """Number of times that the launcher has started the training again."""


class _Launcher(NamedTuple):
    """Environment variables that a launcher sets for each process."""

    rank: str
    world_size: str
    local_rank: str
    restart: str


_LAUNCHERS = (
    # torchrun, Kubeflow's PyTorchJob, Ray Train, Accelerate, Lightning
    _Launcher("RANK", "WORLD_SIZE", "LOCAL_RANK", "TORCHELASTIC_RESTART_COUNT"),
    _Launcher(  # OpenMPI
        "OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_SIZE", "OMPI_COMM_WORLD_LOCAL_RANK", ""
    ),
    _Launcher("SLURM_PROCID", "SLURM_NTASKS", "SLURM_LOCALID", "SLURM_RESTART_COUNT"),
)


def rank_position() -> RankPosition | None:
    """Return this process's position; ``None`` if the process trains alone or its position is not known yet.

    The position comes from the launcher's environment variables, or from torch's process group if one exists.
    """
    return rank_position_in(os.environ) or _of_the_process_group()


def rank_position_in(environment: Mapping[str, str]) -> RankPosition | None:
    """Return the position that a launcher's environment variables name; ``None`` if they name none."""
    for launcher in _LAUNCHERS:
        rank = _number(environment, launcher.rank)
        size = _number(environment, launcher.world_size)
        if rank is None or size is None:
            continue
        if launcher.rank == "SLURM_PROCID" and not _in_a_step(environment):
            continue
        if size < 2 or rank >= size:  # noqa: PLR2004 - one process trains alone
            return None
        local, restart = (_number(environment, name) for name in launcher[2:])
        return RankPosition(rank, size, _job(environment, launcher), local, restart or 0)
    return None


def lower_ranks_are_here(position: RankPosition) -> bool:
    """Return True if all ranks below ``position.rank`` are certainly on this machine."""
    return position.rank == position.local_rank or os.environ.get("MASTER_ADDR") in _LOOPBACK


def described() -> dict[str, str]:
    """Return this process's position as a run's parameters: ``rank``, ``local_rank``, ``world_size``, ….

    If `rank_position` returns ``None``, return the values of torchrun's variables, or nothing if they are not
    set.
    """
    position = rank_position()
    if position is None:
        names = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "TORCHELASTIC_RUN_ID")
        values = {name: os.environ.get(name) for name in names} if "RANK" in os.environ else {}
    else:
        values = {
            "rank": str(position.rank),
            "world_size": str(position.world_size),
            "local_rank": None if position.local_rank is None else str(position.local_rank),
            "restart": str(position.restart) if position.restart else None,
            "TORCHELASTIC_RUN_ID": os.environ.get("TORCHELASTIC_RUN_ID"),
        }
    return {name.lower(): value for name, value in values.items() if value}


def is_first() -> bool:
    """Return True if this process trains alone or has rank 0."""
    position = rank_position()
    return position is None or position.rank == 0


def _number(environment: Mapping[str, str], name: str) -> int | None:
    text = environment.get(name, "")
    return int(text) if text.isascii() and text.isdecimal() else None


def _in_a_step(environment: Mapping[str, str]) -> bool:
    """Return True if `srun` started this process.

    `srun` starts the tasks of a job step. SLURM sets the same variables for a batch script as for the first
    task of a step. Only the step's id differs: in a batch script, it is at least `_BATCH_STEP`.
    """
    step = _number(environment, "SLURM_STEP_ID")
    if step is None:
        step = _number(environment, "SLURM_STEPID")
    return step is not None and step < _BATCH_STEP


def _job(environment: Mapping[str, str], launcher: _Launcher) -> str:
    """Return text that the ranks of one training have in common.

    The text comes from the most reliable source that this process has, such as the launcher's id of the
    training.
    """
    step = environment.get("SLURM_STEP_ID") or environment.get("SLURM_STEPID", "")
    slurm = f"slurm {environment.get('SLURM_JOB_ID', '')}.{step}"
    if launcher.rank == "SLURM_PROCID":
        return slurm
    if launcher.rank != "RANK":
        return f"mpi {environment.get('PMIX_NAMESPACE') or _common_parent()}"
    run_id = environment.get("TORCHELASTIC_RUN_ID", _NO_ID)
    if run_id != _NO_ID:
        return f"torchelastic {run_id}"
    pod = _KUBEFLOW_POD.fullmatch(environment.get("HOSTNAME") or os.uname().nodename)
    if pod is not None:
        return f"pod {pod['job']}"
    if _in_a_step(environment):
        return slurm
    return _of_the_rendezvous(environment)


def _of_the_rendezvous(environment: Mapping[str, str]) -> str:
    """Return the ranks' rendezvous address. If it is unknown, return the ranks' common parent process."""
    port = environment.get("MASTER_PORT")
    return f"{environment.get('MASTER_ADDR', '')}:{port}" if port else _common_parent()


def _common_parent() -> str:
    return f"process {os.getppid()} on {os.uname().nodename}"


def _of_the_process_group() -> RankPosition | None:
    """Return the position in torch's process group; ``None`` if there is no group.

    This function is for processes without a launcher's variables, for example those of `mp.spawn`.
    """
    distributed = getattr(sys.modules.get("torch"), "distributed", None)
    # In a torch built without distributed support the module exists but lacks this function.
    initialized = getattr(distributed, "is_initialized", None)
    if distributed is None or initialized is None or not initialized():
        return None
    rank, size = distributed.get_rank(), distributed.get_world_size()
    if size < 2:  # noqa: PLR2004 - one process trains alone
        return None
    return RankPosition(rank, size, _of_the_rendezvous(os.environ))

"""Search for the run that a rank had before its restart. The new run continues this run in the tracker."""

from __future__ import annotations

import os

from memlog._internal.distributed import RankPosition
from memlog.journal import RunDirectory
from memlog.ranks.registration import Attempt, Registration, last_step, registration_of, steps_of


def attempt_before(run: RunDirectory, position: RankPosition, begun_us: int) -> Attempt | None:
    """Return the attempt before a restart of the training; ``None`` if there is none.

    ``run`` is this rank's run after the restart. The result describes the rank's newest earlier run in the
    same folder of runs.
    """
    # A restart that torchrun has not counted looks like a first start. Then only rank 0 searches: at a real
    # first start there is no attempt to find, and all ranks would search in vain.
    if not position.restart and (position.rank or not _is_torchrun(position)):
        return None
    earlier = [
        (other, known)
        for other in map(RunDirectory, run.path.parent.iterdir())
        if (known := registration_of(other)) is not None
        and known.begun_us < begun_us
        and _is_earlier(other, known, position)
    ]
    if not earlier:
        return None
    before, known = max(earlier, key=lambda found: (found[1].begun_us, found[0].id))
    return Attempt(before.id, known.before.first if known.before else before.id, _end_of(before))


def steps_ahead(run: RunDirectory) -> int:
    """Return the number of steps by which memlog's own run in the tracker is ahead of the session.

    After a restart, the tracker's run already has the steps of the earlier attempts. If the session begins at
    step 0, return the number of these steps. If the session begins at a later step, return 0, because the
    session's step numbers continue those of the earlier attempts. Without a restart, return 0.
    """
    known = registration_of(run)
    if known is None or known.before is None:
        return 0
    first = next((step for file in run.files("trainer") for step in steps_of(file)), 0)
    return 0 if first else known.before.steps


def _is_earlier(run: RunDirectory, known: Registration, position: RankPosition) -> bool:
    its = known.position
    if (its.job, its.rank) != (position.job, position.rank) or its.restart > position.restart:
        return False
    # Under torchrun, a later training may have the same job name, so the parent process must be the same.
    # Under SLURM, a job that is queued again has another parent process. There the job name is enough,
    # because it has the job's unique id.
    is_here = known.host == os.uname().nodename
    has_same_parent = is_here and known.parent == os.getppid()
    # torchrun counts no restart if another machine's ranks failed.
    if its.restart == position.restart:
        return has_same_parent and _is_torchrun(position) and not run.is_alive()
    return position.job.startswith("slurm ") or not is_here or has_same_parent


def _is_torchrun(position: RankPosition) -> bool:
    return position.job.startswith("torchelastic ")


def _end_of(run: RunDirectory) -> int:
    """Return the number of steps that the tracker's run had when the attempt ``run`` ended."""
    last = last_step(run)
    return steps_ahead(run) + (0 if last is None else last + 1)

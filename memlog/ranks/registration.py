"""Registration of a run's rank in a file, and searches for the runs of other ranks and of earlier attempts.

``latest`` means the run of the lowest rank in the newest training. memlog sends this run to the trackers.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import msgspec

from memlog import journal
from memlog._internal.processes import RankPosition
from memlog._internal.safe_files import read_plain, replacing
from memlog.events import Batch
from memlog.journal import JournalFile, Position, RunDirectory
from memlog.journal.format import START, UNDECODABLE
from memlog.journal.reader import segments_in
from memlog.journal.runs import LATEST

_FILE = "rank.json"
_MAX_BYTES = 65536
_TOLERANCE_US = 600_000_000
"""Maximum microseconds by which another rank's run can begin before this rank's run. Each rank loads data
before its run begins, and some ranks take longer than others."""


class Attempt(msgspec.Struct, frozen=True):
    """An earlier attempt of a training. The launcher begins a new attempt at each restart.

    ``run`` is the id of this rank's run in the attempt. ``first`` is the id of this rank's run in the first
    attempt; memlog finds the tracker's run by this id. ``steps`` is the number of steps that the tracker's
    run had when the attempt ended.
    """

    run: str
    first: str
    steps: int


class Registration(msgspec.Struct, frozen=True):
    """Position of a run among the runs of its training.

    ``host`` is the name of the machine, and ``parent`` the id of the process that started the rank, such as
    torchrun's. ``before`` is ``None`` if there was no earlier attempt, or if the earlier attempt left no run.
    """

    position: RankPosition = msgspec.field(name="place")
    """Named ``place`` in the file, as in earlier versions."""
    host: str
    begun_us: int
    parent: int = 0
    before: Attempt | None = None

    def is_of_training(self, other: Registration) -> bool:
        """Return True if this run and another run belong to one training.

        Both runs must have the same name of the training and the same number of ranks. Two runs on one
        machine must also have the same number of restarts. The number of restarts can differ between
        machines: the torchrun of each machine counts only restarts after a failure of its own ranks.
        """
        mine, its = self.position, other.position
        return (mine.job, mine.world_size) == (its.job, its.world_size) and (
            mine.restart == its.restart or self.host != other.host
        )


def register(
    run: RunDirectory, position: RankPosition, begun_us: int, before: Attempt | None = None
) -> Registration:
    """Write a run's position into its folder.

    Raises:
        OSError: The file can't be written.
    """
    registration = Registration(position, os.uname().nodename, begun_us, os.getppid(), before)
    with replacing(run.path, _FILE) as file:
        file.write(msgspec.json.encode(registration))
    return registration


def registration_of(run: RunDirectory) -> Registration | None:
    """Return a run's registration; ``None`` if it is missing or damaged."""
    try:
        return msgspec.json.decode(read_plain(run.path, _FILE, _MAX_BYTES), type=Registration)
    except (OSError, ValueError, *UNDECODABLE):
        return None


class Training:
    """Runs of the ranks of one training.

    ``run`` is the run of one rank. The other ranks' runs are found by their registrations.
    """

    def __init__(self, run: RunDirectory, own: Registration) -> None:
        self.own = own
        self._run = run
        self._found: dict[int, tuple[RunDirectory, Registration]] = {own.position.rank: (run, own)}
        self._not_ours: set[str] = {run.id}

    def search(self) -> dict[int, RunDirectory]:
        """Return the runs of all ranks that are registered by now, by rank.

        An earlier or later training may have the same name. If several runs have the same rank, the run whose
        start is nearest to this run's start is taken. A run that was over before this run began is left out.
        """
        for run in self._new_runs():
            registration = registration_of(run)
            if registration is None:
                continue  # the run trains alone, or does not know its rank yet
            self._not_ours.add(run.id)
            if self._belongs(run, registration):
                self._take(run, registration)
        return {rank: run for rank, (run, _) in sorted(self._found.items())}

    def has_lower_rank(self) -> bool:
        """Return True if a rank below this run's own is registered."""
        return any(
            (registration := registration_of(run)) is not None
            and registration.position.rank < self.own.position.rank
            and self._belongs(run, registration)
            for run in self._new_runs()
        )

    def _new_runs(self) -> Iterator[RunDirectory]:
        root = self._run.path.parent
        try:
            with os.scandir(root) as entries:
                names = {entry.name for entry in entries} - self._not_ours
        except OSError:
            return
        for name in sorted(names):
            yield RunDirectory(root / name)

    def _belongs(self, run: RunDirectory, registration: Registration) -> bool:
        if not registration.is_of_training(self.own):
            return False
        earlier_us = self.own.begun_us - registration.begun_us
        if earlier_us <= 0:
            return True
        if earlier_us > _TOLERANCE_US:
            return False
        if run.last_write() * 1e6 >= self.own.begun_us:
            return True
        # A process of another machine counts as alive for some time after its end. If its run has steps, the
        # run belongs to an earlier attempt: no rank can complete a step before all ranks have begun.
        return run.is_alive() and (registration.host == self.own.host or last_step(run) is None)

    def _take(self, run: RunDirectory, registration: Registration) -> None:
        def distance(known: Registration) -> int:
            return abs(known.begun_us - self.own.begun_us)

        rank = registration.position.rank
        if rank == self.own.position.rank:
            return
        known = self._found.get(rank)
        if known is None or distance(registration) < distance(known[1]):
            self._found[rank] = run, registration


def last_step(run: RunDirectory) -> int | None:
    """Return the last step in a run's journal; ``None`` if it has none."""
    for file in run.files("trainer"):
        # The newest segment first: it has the last step, unless it has no step yet.
        for segment in reversed(file.segments):
            last = max(steps_of(file, Position(segment, 0)), default=None)
            if last is not None:
                return last
    return None


def steps_of(file: JournalFile, since: Position = START) -> Iterator[int]:
    for entry in file.read(since):
        if isinstance(entry.event, Batch):
            yield entry.event.step


def ranks_of(run: RunDirectory) -> dict[int, RunDirectory]:
    """Return the runs of all ranks of a run's training, by rank; empty if ``run`` has no registration."""
    own = registration_of(run)
    return {} if own is None else Training(run, own).search()


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
    before, known = max(earlier, key=lambda candidate: (candidate[1].begun_us, candidate[0].id))
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


def find_named_run(root: Path, name: str) -> RunDirectory:
    """Return the run that a user names, as `memlog.journal.find_run` does, or whose folder the user names.

    A folder is named by a path with a slash, such as ``./k7m2xq9a``.
    For ``latest``, find the training of the newest run. Return the run of this training's lowest rank.

    Raises:
        RunNotFoundError: No run matches.
        AmbiguousRunError: More than one run matches.
    """
    folder = Path(name)
    if os.sep in name and folder.is_dir() and any(segments_in(folder)):
        return RunDirectory(folder.resolve())
    run = journal.find_run(root, name)
    return lowest_rank(run) if name == LATEST else run


def lowest_rank(run: RunDirectory) -> RunDirectory:
    """Return the run of the lowest rank in a run's training; the run itself if it is not registered."""
    return next(iter(ranks_of(run).values()), run)

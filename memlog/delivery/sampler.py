"""Reading, from outside, what would be dear to read in the trainer's loop."""

from __future__ import annotations

import time
from collections.abc import Callable, Collection

from memlog.events import Batch, End, Event, OutOfMemory, Sample, now_us
from memlog.events import Health as HealthEvent
from memlog.health import Health
from memlog.journal import JournalFile, Position
from memlog.journal.format import START
from memlog.probes.cgroup import read_cgroup
from memlog.probes.tree import ProcessTree, available_memory


class StepFollower:
    """Follows the trainer's journal to know which step it is at."""

    def __init__(self, file: JournalFile) -> None:
        self._file = file
        self._at: Position = START
        self.step: int | None = None
        self.since: float | None = None
        """Monotonic time at which the first step was seen."""
        self.end: End | None = None
        """What it said at its end."""
        self.health: HealthEvent | None = None
        """What it last said of its own state."""
        self._failed = False

    @property
    def ended_badly(self) -> bool:
        """Whether it has not said that it ended, or that memory ran out before it did."""
        return self.end is None or (self._failed and self.end.status != "finished")

    def look(self) -> int | None:
        """The newest step in the journal; ``None`` before the first."""
        for entry in self._file.read(self._at):
            self._at = entry.end
            if isinstance(entry.event, Batch):
                self.step = entry.event.step
                self._failed = False
            elif isinstance(entry.event, OutOfMemory):
                self._failed = True
            elif isinstance(entry.event, HealthEvent):
                self.health = entry.event
            elif isinstance(entry.event, End):
                self.end = entry.event
        if self.step is not None and self.since is None:
            self.since = time.monotonic()
        return self.step


class Sampler:
    """Publishes a `Sample` of the trainer's process tree whenever one is due.

    Args:
        trainer: The trainer's process number.
        helpers: Process numbers of memlog's own, which don't count.
        interval: Seconds between samples.
        publish: Takes them.
        follower: Says at which step.
        health: Counts readings that failed.
    """

    def __init__(
        self,
        trainer: int,
        helpers: Collection[int],
        interval: float,
        publish: Callable[[Event], object],
        follower: StepFollower,
        health: Health,
    ) -> None:
        self._trainer = trainer
        self._tree = ProcessTree(trainer, exclude=helpers)
        self._interval = interval
        self._publish = publish
        self._follower = follower
        self._health = health
        self._due = time.monotonic()

    def sample_if_due(self) -> None:
        """Reads and publishes where the interval is over. Never raises."""
        if time.monotonic() < self._due:
            return
        self._due = time.monotonic() + self._interval
        with self._health.contained("sampling the process tree"):
            self._publish(self._read())

    def _read(self) -> Sample:
        tree = self._tree.read()
        group = read_cgroup(self._trainer)
        return Sample(
            time_us=now_us(),
            step=self._follower.look(),
            tree_pss=tree.pss,
            tree_processes=tree.processes,
            available=available_memory(),
            cgroup_used=group.used,
            cgroup_limit=group.limit,
        )

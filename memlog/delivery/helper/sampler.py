"""Reading, from outside, what would be dear to read in the trainer's loop."""

from __future__ import annotations

import math
import time
from collections.abc import Callable

from memlog._internal.diagnostics import Diagnostics
from memlog.delivery.helper.client import ARGUMENTS
from memlog.events import Batch, End, Event, OutOfMemory, Sample, now_us
from memlog.events import Health as HealthEvent
from memlog.journal import JournalFile, Position
from memlog.journal.format import START
from memlog.probes.cgroup import read_cgroup
from memlog.probes.tree import ProcessTree, available_memory

_STEPS = 5
"""Steps after which a sample is due before its time, at first."""
_PART = 100
"""Part of the steps so far, as its divisor, after which one is due later on: the journal stays small."""
_LOOK = 0.05
"""Seconds between samples at least, and between looks at a fast trainer."""
_SHARE = 0.02
"""Share of a processor's time that samples by steps may take."""
_FIRST = 0.2
"""Seconds of a processor that they may take before that: a short run is over before a share allows many."""


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
    """Publishes a `Sample` of the trainer's process tree whenever one is due, by time or by steps.

    Args:
        trainer: The trainer's process number.
        interval: Seconds between samples, at most.
        publish: Takes them.
        follower: Says at which step.
        diagnostics: Counts readings that failed.
    """

    def __init__(
        self,
        trainer: int,
        interval: float,
        publish: Callable[[Event], object],
        follower: StepFollower,
        diagnostics: Diagnostics,
    ) -> None:
        self._trainer = trainer
        self._tree = ProcessTree(trainer, leave_out=ARGUMENTS)
        self._interval = interval
        self._publish = publish
        self._follower = follower
        self._diagnostics = diagnostics
        self._due = self._rested = time.monotonic()
        self._pace = _Pace()
        self._free = _FIRST

    @property
    def pause(self) -> float:
        """Seconds after which to ask again: less than a sample's interval where steps are fast."""
        return _LOOK if self._pace.is_fast(self._interval) else self._interval

    def sample_if_due(self) -> None:
        """Reads and publishes where the interval or enough steps are over. Never raises."""
        now = time.monotonic()
        if now < self._rested:
            return
        with self._diagnostics.contained("sampling the process tree"):
            by_steps = self._pace.take(self._follower.look(), now)
            if by_steps or now >= self._due:
                self._due = now + self._interval
                before = time.thread_time()
                self._publish(self._read())
                self._pace.sampled()
                self._rested = now + self._rest(time.thread_time() - before)

    def _rest(self, cost: float) -> float:
        """Seconds to the next sample at least, after one that took so many of a processor."""
        free = min(cost, self._free)
        self._free -= free
        return min(max(_LOOK, (cost - free) / _SHARE), self._interval)

    def _read(self) -> Sample:
        tree = self._tree.read()
        group = read_cgroup(self._trainer)
        return Sample(
            time_us=now_us(),
            step=self._follower.step,
            tree_pss=tree.pss,
            tree_processes=tree.processes,
            available=available_memory(),
            cgroup_used=group.used,
            cgroup_limit=group.limit,
            tree_file=tree.file,
        )


class _Pace:
    """How fast the trainer steps, and how many steps are worth a sample."""

    def __init__(self) -> None:
        self._first: int | None = None
        self._newest = self._sampled = 0
        self._seen = 0.0
        self._a_second = 0.0

    def take(self, step: int | None, now: float) -> bool:
        """Takes the newest step; says whether enough have passed since the last sample."""
        if step is None:
            return False
        begins = self._first is None
        if self._first is None:
            self._first = step
            self._a_second = math.inf  # unknown until the next look: that is soon
        elif now > self._seen:
            self._a_second = (step - self._newest) / (now - self._seen)
        self._newest, self._seen = step, now
        return begins or step - self._sampled >= self._wanted

    def sampled(self) -> None:
        """A sample of the newest step was taken."""
        self._sampled = self._newest

    def is_fast(self, interval: float) -> bool:
        """Whether enough steps come within so many seconds."""
        return self._a_second * interval >= self._wanted

    @property
    def _wanted(self) -> int:
        return max(_STEPS, (self._newest - (self._first or 0)) // _PART)

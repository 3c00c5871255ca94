"""Read one rank's journal while it is written."""

from __future__ import annotations

import os
import time
from collections.abc import Iterator
from pathlib import Path

from memlog.events import (
    POSTMORTEM_KIND,
    Artifact,
    Batch,
    End,
    Event,
    Exit,
    Finding,
    Inquiry,
    OutOfMemory,
    readings,
)
from memlog.facts.levels import LevelFold
from memlog.journal import Header, RunDirectory
from memlog.journal.follower import Follower
from memlog.journal.format import Role

ROLE: Role = "ranks"
"""Role of the journal that rank 0's helper writes about all ranks."""
_WRITTEN_WITHIN = 2.0
"""Seconds to wait for the event that tells a rank's end, after the rank's process is gone. If no event comes,
the rank counts as lost (`RankReader.is_lost`)."""


class RankReader:
    """Reader of one rank's journal. ``is_judged``: True if `levels` is wanted, which costs time.

    Attributes:
        step: Last completed step of the rank; ``None``: no step is completed.
        failure: Failed allocation after this step; ``None``: none.
        levels: Memory in use after the rank's steps.
        has_ended: True if the rank's journal tells its end.
        has_report: True if the rank's journal has a report on the rank's bad end.
        has_finding: True if the cause of the rank's growth is known.
    """

    def __init__(self, run: RunDirectory, *, is_judged: bool = False) -> None:
        self.run = run
        self._is_judged = is_judged
        self.step: int | None = None
        self.failure: OutOfMemory | None = None
        self.levels = LevelFold()
        self.has_report = self.has_finding = False
        self._follower = Follower(run, lambda _: run.id)
        self.has_ended = False
        self._gone_since: float | None = None

    def look_again(self) -> None:
        """Search for new files at the next reading."""
        self._follower.look_again()

    def news(self) -> Iterator[tuple[Header, Event]]:
        """Yield the events since the last call, except those that rank 0's helper wrote about all ranks."""
        for _, header, event in self._follower.news():
            if header.role == ROLE:
                continue
            self._note(event)
            yield header, event

    def _note(self, event: Event) -> None:
        if isinstance(event, Batch):
            self.step, self.failure = event.step, None
            if self._is_judged:
                self.levels.take(event.step, list(readings(event)))
        elif isinstance(event, Inquiry):
            self.levels.take_search(goes_on=event.searching)
        elif isinstance(event, Finding):
            self.has_finding |= bool(event.rate)
        elif isinstance(event, OutOfMemory):
            self.failure = None if event.caught else event
        elif isinstance(event, Artifact):
            self.has_report |= event.kind == POSTMORTEM_KIND
        elif isinstance(event, (End, Exit)):
            self.has_ended = True

    @property
    def is_over(self) -> bool:
        """True if the journal tells the rank's end, or the process has been gone for `_WRITTEN_WITHIN` s."""
        if self.has_ended:
            return True
        if self.run.is_alive():
            self._gone_since = None
            return False
        self._gone_since = self._gone_since or time.monotonic()
        return time.monotonic() - self._gone_since >= _WRITTEN_WITHIN

    @property
    def is_lost(self) -> bool:
        """True if the rank has ended, and its journal does not say how it ended."""
        return self.is_over and not self.has_ended

    @property
    def state(self) -> str | None:
        """The kernel's letter for the state of the process; ``None``: unknown, or on another machine."""
        header = self.run.trainer()
        if header is None or header.process.host != os.uname().nodename or not self.run.is_alive():
            return None
        try:
            stat = Path("/proc", str(header.process.pid), "stat").read_text(errors="replace")
        except OSError:
            return None
        return stat.rpartition(")")[2].split()[0]

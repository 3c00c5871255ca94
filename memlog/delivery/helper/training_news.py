"""Alerts in the run of rank 0 about all ranks of the training."""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping

import msgspec

from memlog.delivery.helper.rank_reader import RankReader
from memlog.events import Alert, Batch, End, Event, Exit, now_us
from memlog.ranks.ends import Failure, RankEnd, bad_end, failure_of
from memlog.ranks.registration import Registration
from memlog.ranks.stalls import Stall, Stalls

RANK_ENDED = "ranks: ended"
RANK_STALLS = "ranks: stalls"
RESTARTED = "ranks: restarted"
"""Value of `Alert.rule` if the alert is about a restart. If a rank ended or stalls, the value is `RANK_ENDED`
or `RANK_STALLS`."""
_SETTLED = 5.0
"""Seconds to wait after the first bad end of a rank, so that helpers can write how the other ranks ended."""

UNEXPECTED_END = "ended unexpectedly"
"""Rule of the alert about a trainer that died without an end event."""


class TrainingNews:
    """The alerts of the other ranks, and alerts about ranks that ended, that stall or that were restarted.

    ``own`` is the `Registration` of rank 0. ``readers`` maps each rank to the reader of the rank's journal.
    If the caller finds another rank, it adds that rank's reader to ``readers``.
    """

    def __init__(self, own: Registration, readers: Mapping[int, RankReader]) -> None:
        self._own = own
        self._readers = readers
        self._stalls = Stalls()
        self._ends: dict[int, RankEnd] = {}
        self._over: set[int] = set()
        self._first_seen: float | None = None
        self._reported = self._began = False
        self._ready: list[Alert] = []

    def take(self, rank: int, event: Event) -> None:
        if isinstance(event, Batch):
            self._stalls.step(rank, event.step, time.monotonic())
            if not self._began and rank == self._own.position.rank:
                self._began = True
                self._note_restart(event)
        elif isinstance(event, (End, Exit)):
            self._note_end(rank, event)
        elif (
            isinstance(event, Alert)
            and rank != self._own.position.rank
            and event.rule != UNEXPECTED_END  # one new alert covers such ends of all ranks
        ):
            self._ready.append(msgspec.structs.replace(event, title=f"rank {rank}: {event.title}"))

    def alerts(self, *, final: bool = False) -> Iterator[Alert]:
        """Yield the new alerts since the last call.

        The alert about a bad end comes `_SETTLED` seconds after the first bad end of a rank. With ``final``,
        this alert comes at once, because no rank will write any more.
        """
        ready, self._ready = self._ready, []
        yield from ready
        for stall in self._stalls.look(time.monotonic(), lambda rank: self._readers[rank].state):
            yield _about(stall)
        settled = self._first_seen is not None and time.monotonic() - self._first_seen >= _SETTLED
        failure = self.failure
        if failure is not None and not self._reported and (final or settled):
            self._reported = True
            first = failure.first or failure.afterwards[0]
            yield Alert(first.time_us, first.step, "error", RANK_ENDED, failure.title, failure.text)

    @property
    def failure(self) -> Failure | None:
        """Bad end of the training; ``None`` if the training goes on or has ended well."""
        return failure_of(list(self._ends.values()))

    def lost(self, rank: int) -> None:
        """Record that a rank has ended. Call it if no helper process has written how the rank ended."""
        if rank not in self._over:
            written_us = int(self._readers[rank].run.last_write() * 1e6)
            self._note_end(rank, Exit(written_us, None, None))

    def _note_end(self, rank: int, event: End | Exit) -> None:
        self._stalls.end(rank)
        if rank in self._over:
            return
        self._over.add(rank)
        end = bad_end(rank, event, self._readers[rank].step)
        if end is not None:
            self._ends[rank] = end
            self._first_seen = self._first_seen or time.monotonic()

    def _note_restart(self, event: Batch) -> None:
        restart, before = self._own.position.restart, self._own.before
        if not restart and before is None:
            return
        title, why = "the launcher restarted the training", "it has started all ranks again"
        if restart:
            title = f"{title} (restart {restart})"
        else:  # this machine's launcher did not count the restart
            why += ", because a rank of another machine failed, or a machine joined or left"
        text = f"{why}; this is the first step after that"
        self._ready.append(Alert(event.time_us, event.step, "warning", RESTARTED, title, text))


def _about(stall: Stall) -> Alert:
    if stall.why is None:
        title = f"rank {stall.rank} goes on"
        return Alert(now_us(), stall.step, "info", RANK_STALLS, title, "it stalled before")
    after = "before its first step" if stall.step is None else f"after step {stall.step:,}"
    return Alert(
        now_us(),
        stall.step,
        "error",
        RANK_STALLS,
        f"rank {stall.rank} stalls {after}",
        f"no rank has made a step for {stall.seconds:.0f} s, and {stall.why}",
        stall.seconds,
    )

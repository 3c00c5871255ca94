"""What the run of the lowest rank tells about all ranks: their findings, their alerts and their ends."""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping

from msgspec.structs import replace

from memlog.delivery.helper.rank_reader import RankReader
from memlog.events import Alert, Batch, End, Event, Exit, Finding, now_us
from memlog.facts.failure import OF_ENDS
from memlog.facts.finding_alerts import new_alert
from memlog.findings import after_step, of_rank, same_on_ranks
from memlog.ranks.ends import Failure, RankEnd, bad_end, failure_of
from memlog.ranks.registration import Registration, registration_of
from memlog.ranks.stalls import Stall, Stalls

RANK_ENDED = "ranks: ended"
RANK_STALLS = "ranks: stalls"
RESTARTED = "ranks: restarted"
"""Value of `Alert.rule` if the alert is about a restart. If a rank ended or stalls, the value is `RANK_ENDED`
or `RANK_STALLS`."""
_SETTLED = 5.0
"""Seconds to wait after the first bad end of a rank, so that helpers can write how the other ranks ended."""
_HELD = 10.0
"""Seconds that the alert about another rank's finding waits. If the same was found in this rank by then,
there is no alert about the other rank."""
_MOST_FINDINGS = 200
"""Maximum number of the other ranks' findings that are copied."""


class TrainingNews:
    """The findings and alerts of the other ranks, and alerts about ranks that stall or were restarted.

    ``own`` is the `Registration` of the lowest rank. ``readers`` maps each rank to the reader of the rank's
    journal. If the caller finds another rank, it adds that rank's reader to ``readers``.
    """

    def __init__(self, own: Registration, readers: Mapping[int, RankReader]) -> None:
        self._own = own
        self._readers = readers
        self._stalls = Stalls()
        self._ends: dict[int, RankEnd] = {}
        self._over: set[int] = set()
        self._first_seen: float | None = None
        self._began = False
        self._ready: list[Alert | Finding] = []
        self._copied = 0
        self._held: list[tuple[float, Finding]] = []
        self._known: set[tuple[str, str | None]] = set()

    def take(self, rank: int, event: Event) -> None:
        is_own = rank == self._own.position.rank
        if isinstance(event, Batch):
            self._stalls.step(rank, event.step, time.monotonic())
            if not self._began and is_own:
                self._began = True
                self._note_restart(event)
        elif isinstance(event, (End, Exit)):
            self._note_end(rank, event)
        elif isinstance(event, Finding):
            self._note_finding(rank, event, is_own=is_own)
        elif (
            isinstance(event, Alert)
            and not is_own
            and event.rule not in OF_ENDS  # one new alert covers the bad ends of all ranks
            and not event.is_of_finding  # `_note_finding` makes an alert for the first of several ranks
        ):
            self._ready.append(replace(event, title=of_rank(rank, event.title)))

    def news(self, *, final: bool = False) -> Iterator[Alert | Finding]:
        """Yield the new findings and alerts since the last call.

        With ``final``, no rank will write any more.
        """
        ready, self._ready = self._ready, []
        yield from ready
        yield from self._alerts_about_findings(final=final)
        for stall in self._stalls.look(time.monotonic(), lambda rank: self._readers[rank].state):
            yield _about(stall)

    @property
    def has_settled(self) -> bool:
        """True if a rank has ended badly, and the other ranks had time to end, too."""
        return self._first_seen is not None and time.monotonic() - self._first_seen >= _SETTLED

    @property
    def failure(self) -> Failure | None:
        """Bad end of the training; ``None`` if the training goes on or has ended well."""
        ends = list(self._ends.values())
        if ends:
            # A rank that ran out of memory may be busy with its end.
            ends += [
                end
                for rank, reader in self._readers.items()
                if rank not in self._over and reader.failure is not None
                if (end := self._end_of(rank, End(reader.failure.time_us, "failed"))) is not None
            ]
        return failure_of(ends, self._own.position.world_size, len(self._readers))

    def lost(self, rank: int) -> None:
        """Record that a rank has ended. Call it if no helper process has written how the rank ended."""
        if rank not in self._over:
            written_us = int(self._readers[rank].run.last_write() * 1e6)
            self._note_end(rank, Exit(written_us, None, None), lost=True)

    def _note_end(self, rank: int, event: End | Exit, *, lost: bool = False) -> None:
        self._stalls.end(rank)
        if rank in self._over:
            return
        self._over.add(rank)
        end = self._end_of(rank, event, lost=lost)
        if end is not None:
            self._ends[rank] = end
            self._first_seen = self._first_seen or time.monotonic()

    def _end_of(self, rank: int, event: End | Exit, *, lost: bool = False) -> RankEnd | None:
        reader = self._readers[rank]
        registration = registration_of(reader.run)
        host = None if registration is None else registration.host
        return bad_end(rank, event, reader.step, reader.failure, host, lost=lost)

    def _note_finding(self, rank: int, finding: Finding, *, is_own: bool) -> None:
        if is_own:
            self._known.add(same_on_ranks(finding))
        elif self._copied < _MOST_FINDINGS:
            self._copied += 1
            copy = replace(finding, title=of_rank(rank, finding.title), rank=rank)
            self._ready.append(copy)
            self._held.append((time.monotonic() + _HELD, copy))

    def _alerts_about_findings(self, *, final: bool) -> Iterator[Alert]:
        now = time.monotonic()
        due = [copy for at, copy in self._held if final or at <= now]
        self._held = [] if final else [held for held in self._held if held[0] > now]
        for copy in due:
            if same_on_ranks(copy) not in self._known:
                self._known.add(same_on_ranks(copy))
                yield new_alert(copy)

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
        title = f"Rank {stall.rank} goes on"
        return Alert(now_us(), stall.step, "info", RANK_STALLS, title, "it stalled before")
    return Alert(
        now_us(),
        stall.step,
        "error",
        RANK_STALLS,
        f"Rank {stall.rank} stalls {after_step(stall.step)}",
        f"no rank has made a step for {stall.seconds:.0f} s, and {stall.why}",
        stall.seconds,
    )

"""Find out which rank of a training failed first, and which ranks ended afterwards."""

from __future__ import annotations

from collections.abc import Collection

import msgspec

from memlog.events import LOST_CONNECTION, End, Event, Exit, OutOfMemory, Status
from memlog.findings import (
    also_ended,
    ended_together,
    how_it_ended,
    no_rank_is_the_cause,
    rank_ended,
    without_runs,
)

_TOGETHER_US = 1_000_000
"""Microseconds. If signals from outside end several ranks within this time, no rank is the cause."""
_LOST_TOGETHER_US = 10_000_000
"""Microseconds. If the ends of several ranks were not observed, and their last events are this close, their
order is unknown."""
_NOTICED_LATE_US = 2_000_000
"""Maximum microseconds from a rank's failure until a busy machine notices it. Clocks of machines may differ
as much."""
_BLAMED_WITHIN_US = 20_000_000
"""Maximum microseconds from the end of a rank that lost its connection to another rank, until the other rank
has ended. Launchers kill the remaining ranks after 30 s."""
FROM_OUTSIDE = frozenset({"SIGTERM", "SIGINT", "SIGHUP"})
"""Signals that a launcher, a scheduler or a person sends."""
_CONSEQUENCES = FROM_OUTSIDE | {"SIGABRT"}
"""Signals that can be the consequence of another rank's end. NCCL's watchdog ends a process by SIGABRT."""
WAS_INTERRUPTED = "was interrupted"
"""Value of `RankEnd.how` after Ctrl-C."""


class RankEnd(msgspec.Struct, frozen=True):
    """Bad end of one rank: it failed, was interrupted, or ended without an end event.

    ``how`` is a predicate such as ``failed`` or ``was killed by SIGKILL``. ``signal`` is ``None`` if no known
    signal ended the process. ``step`` is the last completed step; ``None``: there is none. ``host`` is the
    name of the rank's machine; ``None``: unknown.
    """

    rank: int
    time_us: int
    how: str
    signal: str | None = None
    step: int | None = None
    status: Status = "killed"
    out_of_memory: bool = False
    reason: str | None = None
    known: bool = True
    """True if it is known how the process ended."""
    lost: bool = False
    """True if no process observed the end. ``time_us`` is then the time of the rank's last event."""
    host: str | None = None

    @property
    def from_outside(self) -> bool:
        """True if a launcher, a scheduler or a person ended the rank."""
        return self.signal in FROM_OUTSIDE or self.how == WAS_INTERRUPTED

    @property
    def lost_connection(self) -> bool:
        """True if the rank failed because another rank was gone."""
        return self.reason == LOST_CONNECTION and not self.out_of_memory

    @property
    def weight(self) -> int:
        """Return 0 for an end that no other rank's end can have caused, and more for likely consequences."""
        crashed = self.signal is not None and self.signal not in _CONSEQUENCES
        if self.out_of_memory or crashed or self.how == WAS_INTERRUPTED:
            return 0
        if not self.known:
            return 2
        return 3 if self.lost_connection or self.signal is not None else 1

    @property
    def sentence(self) -> str:
        """Sentence such as ``Rank 3 was killed by SIGKILL after step 120``."""
        return rank_ended(self.rank, self.how, self.step, self.reason)


class Failure(msgspec.Struct, frozen=True):
    """Bad end of a training of ``world_size`` ranks, of which ``known`` have a run in this folder.

    ``first`` is ``None`` if no rank is the cause, or if it is unknown which one is. Then ``afterwards`` has
    the bad ends of all ranks.
    """

    first: RankEnd | None
    afterwards: tuple[RankEnd, ...]
    world_size: int | None = None
    known: int | None = None

    @property
    def status(self) -> Status:
        """Status of the rank that failed first. If no rank is the cause: ``failed`` if a rank has failed."""
        if self.first is not None:
            return self.first.status
        return "failed" if any(end.status == "failed" for end in self.afterwards) else "killed"

    @property
    def title(self) -> str:
        """Sentence about the rank that failed first, or about what ended all ranks."""
        if self.first is not None:
            return self.first.sentence
        ends = self.afterwards
        if ends[0].lost_connection:
            ends = tuple(end for end in ends if end.lost_connection)
            how = LOST_CONNECTION
        elif ends[0].from_outside:
            ends = tuple(end for end in ends if end.from_outside)
            same = len({end.how for end in ends}) == 1
            how = ends[0].how if same else WAS_INTERRUPTED
        else:
            how = ends[0].how
        steps = [end.step for end in ends if end.step is not None]
        return ended_together([end.rank for end in ends], how, max(steps, default=None))

    @property
    def step(self) -> int | None:
        """Last completed step of the rank that failed first; ``None``: unknown."""
        return (self.first or self.afterwards[0]).step

    @property
    def text(self) -> str:
        """Remark to print after `title`: which other ranks ended badly, and why."""
        missing = without_runs(self.world_size, self.known)
        if self.first is None:
            first = self.afterwards[0]
            return no_rank_is_the_cause(is_from_outside=first.from_outside, missing=missing)
        return also_ended(
            [(end.rank, end.signal) for end in self.afterwards if not end.out_of_memory],
            [end.rank for end in self.afterwards if end.out_of_memory],
            missing,
        )


def bad_end(
    rank: int,
    event: Event,
    step: int | None,
    failure: OutOfMemory | None = None,
    host: str | None = None,
    *,
    lost: bool = False,
) -> RankEnd | None:
    """Return a rank's bad end from its run's last event; ``None`` if the event is no bad end.

    ``failure`` is the failed allocation after the rank's last step; ``None``: none. ``lost``: see `RankEnd`.
    """
    if isinstance(event, Exit):
        how = how_it_ended(event.signal, event.code)
        known = event.signal is not None or event.code is not None
        end = RankEnd(
            rank, event.time_us, how, event.signal, step, known=known, lost=lost, host=host
        )
    elif isinstance(event, End) and event.status != "finished":
        how = "failed" if event.status == "failed" else WAS_INTERRUPTED
        end = RankEnd(
            rank, event.time_us, how, None, step, event.status, reason=event.reason, host=host
        )
    else:
        return None
    if failure is None:
        return end
    return msgspec.structs.replace(
        end,
        time_us=failure.time_us,
        how="ran out of memory",
        signal=None,
        reason=None,
        out_of_memory=True,
        known=True,
        lost=False,
    )


def failure_of(
    ends: Collection[RankEnd], world_size: int | None = None, known: int | None = None
) -> Failure | None:
    """Return the failure of a training from its ranks' bad ends; ``None`` if there are none.

    The rank that ended first is the cause, with these exceptions. A rank that ended up to two seconds later
    is the cause if its end can't be a consequence (a crash, lack of memory), because a busy machine notices
    ends late. The same holds for 20 seconds if the first rank had lost its connection. If the end of several
    ranks came from outside, or nobody observed it, no rank is the cause.
    """
    if not ends:
        return None
    ordered = sorted(ends, key=lambda end: (end.time_us, end.rank))
    first = _cause(ordered)
    others = tuple(end for end in ordered if end is not first)
    if _is_unknown(first, others, world_size, known):
        return Failure(None, tuple(ordered), world_size, known)
    return Failure(first, others, world_size, known)


def _cause(ordered: list[RankEnd]) -> RankEnd:
    earliest = ordered[0]
    within = _BLAMED_WITHIN_US if earliest.lost_connection else _NOTICED_LATE_US
    candidates = [end for end in ordered if end.time_us - earliest.time_us <= within]
    if earliest.lost:
        # It can have ended long after its last event.
        candidates = [end for end in ordered if end is earliest or not end.from_outside]
    elif earliest.from_outside:
        # Times on one machine are exact, so what ended after a signal from outside did not cause it.
        candidates = [end for end in candidates if end is earliest or _is_elsewhere(end, earliest)]
    return min(candidates, key=lambda end: (end.weight, end.time_us, end.rank))


def _is_elsewhere(end: RankEnd, other: RankEnd) -> bool:
    return end.host != other.host and not end.from_outside


def _is_unknown(
    first: RankEnd, others: tuple[RankEnd, ...], world_size: int | None, known: int | None
) -> bool:
    def among(is_alike: Collection[RankEnd], within: int) -> bool:
        return any(abs(end.time_us - first.time_us) < within for end in is_alike)

    if first.from_outside:
        return among([end for end in others if end.from_outside], _TOGETHER_US)
    if not first.known:
        within = _LOST_TOGETHER_US if first.lost else _TOGETHER_US
        return among([end for end in others if not end.known], within)
    if first.lost_connection:
        # The other rank has no run here, or only the network failed.
        return bool(others) or without_runs(world_size, known) is not None
    return False

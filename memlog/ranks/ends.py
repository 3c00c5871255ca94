"""Find out which rank of a training ended first, and which ranks ended afterwards."""

from __future__ import annotations

from collections.abc import Collection, Iterable

import msgspec

from memlog.events import End, Event, Exit

_TOGETHER_US = 1_000_000
"""Microseconds. If the same signal from outside ends several ranks within this time, no rank is the cause."""
_NOTICED_LATE_US = 2_000_000
"""Maximum microseconds from a crash until a busy machine notices the crash."""
FROM_OUTSIDE = frozenset({"SIGTERM", "SIGINT", "SIGHUP"})
"""Signals that a launcher, a scheduler or a person sends."""
_CONSEQUENCES = FROM_OUTSIDE | {"SIGABRT"}
"""Signals that can be the consequence of another rank's end. NCCL's watchdog ends a process by SIGABRT."""
_NAMED = 8
"""Maximum number of ranks that a text lists. A text only counts further ranks."""


class RankEnd(msgspec.Struct, frozen=True):
    """Bad end of one rank: it failed, was interrupted, or ended without an end event.

    ``how`` is a predicate such as ``failed`` or ``was killed by SIGKILL``. ``signal`` is ``None`` if no known
    signal ended the process. ``step`` is the last completed step; ``None``: there is none.
    """

    rank: int
    time_us: int
    how: str
    signal: str | None = None
    step: int | None = None

    @property
    def crashed(self) -> bool:
        """True if a signal killed the process, and the end of another rank can't have caused this signal."""
        return self.signal is not None and self.signal not in _CONSEQUENCES

    @property
    def sentence(self) -> str:
        """Sentence such as ``rank 3 was killed by SIGKILL after step 120``."""
        when = "before its first step" if self.step is None else f"after step {self.step:,}"
        return f"rank {self.rank} {self.how} {when}"


class Failure(msgspec.Struct, frozen=True):
    """Bad end of a training.

    ``first`` is ``None`` if a signal from outside ended the ranks together. Then ``afterwards`` has the bad
    ends of all ranks.
    """

    first: RankEnd | None
    afterwards: tuple[RankEnd, ...]

    @property
    def title(self) -> str:
        """Sentence about the rank that ended first, or about the signal that ended all ranks."""
        if self.first is None:
            signal = self.afterwards[0].signal
            return f"{signal} ended {_ranks(end.rank for end in self.afterwards)} together"
        return self.first.sentence

    @property
    def text(self) -> str:
        """Remark to print after `title`: which other ranks ended badly, and why."""
        if self.first is None:
            return "no rank failed before: the job was cancelled, preempted or out of time"
        if not self.afterwards:
            return "no other rank has ended badly"
        others = [end.rank for end in self.afterwards]
        signals = {end.signal for end in self.afterwards}
        by = f" ({signal})" if len(signals) == 1 and (signal := signals.pop()) else ""
        cause = "it is not the cause" if len(others) == 1 else "they are not the cause"
        return (
            f"{_ranks(others)} ended afterwards{by}: {cause}; if a rank ends badly, the launcher ends the "
            "others, or they fail without it"
        )


def bad_end(rank: int, event: Event, step: int | None) -> RankEnd | None:
    """Return a rank's bad end from its run's last event; ``None`` if the event is no bad end."""
    if isinstance(event, Exit):
        return RankEnd(rank, event.time_us, how_it_ended(event), event.signal, step)
    if isinstance(event, End) and event.status != "finished":
        how = "failed" if event.status == "failed" else "was interrupted"
        return RankEnd(rank, event.time_us, how, None, step)
    return None


def how_it_ended(event: Exit) -> str:
    """Return the predicate of a sentence about a process that ended without finishing its run."""
    if event.signal is not None:
        return f"was killed by {event.signal}"
    if event.code is not None:
        return f"exited with code {event.code} without finishing its run"
    return "ended without finishing its run"


def failure_of(ends: Collection[RankEnd]) -> Failure | None:
    """Return the failure of a training from its ranks' bad ends; ``None`` if there are none.

    The rank that ended first is the cause, with two exceptions. If one signal from outside ended several
    ranks within a second, no rank is the cause. If no signal ended the first rank, and a rank crashed up to
    two seconds later, the crashed rank is the cause, because a busy machine notices a crash late.
    """
    if not ends:
        return None
    ordered = sorted(ends, key=lambda end: (end.time_us, end.rank))
    if ordered[0].signal is None:
        latest = ordered[0].time_us + _NOTICED_LATE_US
        ordered.sort(key=lambda end: not (end.crashed and end.time_us <= latest))
    first, others = ordered[0], ordered[1:]
    if first.signal in FROM_OUTSIDE and any(
        other.signal == first.signal and other.time_us - first.time_us < _TOGETHER_US
        for other in others
    ):
        return Failure(None, tuple(ordered))
    return Failure(first, tuple(others))


def _ranks(numbers: Iterable[int]) -> str:
    ranks = sorted(numbers)
    shown = [str(rank) for rank in ranks[:_NAMED]]
    if len(ranks) > _NAMED:
        return f"ranks {', '.join(shown)} and {len(ranks) - _NAMED:,} more"
    if len(shown) == 1:
        return f"rank {shown[0]}"
    return f"ranks {', '.join(shown[:-1])} and {shown[-1]}"

"""Ranks that make no more steps while the others wait for them."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import msgspec

STALLED_AFTER = 60.0
"""Seconds without a step after which a rank can count as stalled."""
_LONGEST = 10
"""Minimum length of a stall, as a multiple of the rank's longest pause between two steps so far. Shorter
pauses do not count, because a rank also pauses to save a checkpoint, for example."""
_STATES = {"T": "its process is stopped", "D": "its process waits for a disk or a device"}


class Stall(msgspec.Struct, frozen=True):
    """A rank that stalls, or goes on after a stall.

    ``step`` is the last completed step; ``None``: there is none. ``seconds`` is the time without a step; 0 if
    the rank goes on. ``why`` is the evidence that this rank stalls; ``None``: the rank goes on.
    """

    rank: int
    step: int | None
    seconds: float
    why: str | None


class _Progress:
    def __init__(self, now: float) -> None:
        self.step: int | None = None
        self.since = now
        self.longest_pause = 0.0
        self.stalled = False

    def is_silent(self, now: float) -> bool:
        return now - self.since >= max(STALLED_AFTER, _LONGEST * self.longest_pause)


class Stalls:
    """Detector of the ranks that stall.

    If one rank stalls, all ranks stop at the next exchange of gradients. So a stall is reported only if no
    rank makes steps. A rank is reported if its last step is earlier than another rank's, or if its process is
    stopped or waits in the kernel. If all ranks would be reported, no rank is reported.
    """

    def __init__(self) -> None:
        self._ranks: dict[int, _Progress] = {}

    def step(self, rank: int, step: int, now: float) -> None:
        """Record that a rank has completed a step. ``now`` is the monotonic time in seconds."""
        progress = self._ranks.setdefault(rank, _Progress(now))
        if progress.step is not None:
            progress.longest_pause = max(progress.longest_pause, now - progress.since)
        progress.step, progress.since = step, now

    def end(self, rank: int) -> None:
        self._ranks.pop(rank, None)

    def look(self, now: float, state_of: Callable[[int], str | None]) -> Iterator[Stall]:
        """Yield the ranks whose stall has begun or ended since the last call.

        ``now`` is the monotonic time in seconds. ``state_of`` returns the kernel's letter for the state of a
        rank's process; ``None``: unknown.
        """
        for rank, progress in self._ranks.items():
            if progress.stalled and not progress.is_silent(now):
                progress.stalled = False
                yield Stall(rank, progress.step, 0.0, None)
        if len(self._ranks) < 2 or not all(  # noqa: PLR2004 - no other rank waits for a single one
            progress.is_silent(now) for progress in self._ranks.values()
        ):
            return
        found = {rank: why for rank in self._ranks if (why := self._why(rank, state_of))}
        if len(found) == len(self._ranks):
            return
        for rank, why in found.items():
            progress = self._ranks[rank]
            if not progress.stalled:
                progress.stalled = True
                yield Stall(rank, progress.step, now - progress.since, why)

    def _why(self, rank: int, state_of: Callable[[int], str | None]) -> str | None:
        newest = max(progress.step or 0 for progress in self._ranks.values())
        own = self._ranks[rank].step
        if own is not None and own < newest:
            return f"other ranks have completed step {newest:,}"
        return _STATES.get(state_of(rank) or "")

"""Memory of the ranks of one training, compared at each step, and ranks that make no more steps."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator

import msgspec

from memlog.events import ALLOCATED, HOST_RSS, RESERVED, Batch, Ranks, RankSpread, readings
from memlog.metrics import bucket_start

LATE = 30.0
"""Maximum seconds that a step waits for slow ranks. Afterwards, the step's figures leave out these ranks."""
_MAX_OPEN = 10_000
"""Maximum number of steps that wait for slow ranks. At this number, the figures of the oldest step leave out
these ranks. So memory stays bounded if one rank stops while the others go on."""


class RankSpreads:
    """Comparison of the ranks' memory at each step.

    The first 10,000 steps are compared one by one. Later steps are compared in buckets: of ten steps, then of
    a hundred, and so on. The trackers' points have the same buckets (`memlog.metrics.bucket_start`). In a
    bucket, the largest value of each rank counts.

    ``after`` is the last step that an earlier process published; ``None``: no step was published.
    """

    def __init__(self, world_size: int, initial_step: int = 0, after: int | None = None) -> None:
        self._world_size = world_size
        self._initial = initial_step
        self._after = -1 if after is None else after
        self._open: dict[int, _Bucket] = {}
        self._last: dict[int, int] = {}
        self._ended: set[int] = set()

    def know(self, rank: int) -> None:
        """Record that a rank's run was found. The rank can still be before its first step."""
        self._last.setdefault(rank, -1)

    def end(self, rank: int) -> None:
        """Record that a rank will complete no more steps."""
        self._ended.add(rank)

    def add(self, rank: int, event: Batch) -> None:
        """Add a step of a rank, unless the step was published already."""
        self._last[rank] = event.step
        if event.step <= self._after:
            return
        start = self._start(event.step)
        bucket = self._open.get(start)
        if bucket is None:
            bucket = self._open[start] = _Bucket(time.monotonic())
        bucket.add(rank, event)

    def take(self, *, final: bool = False) -> Iterator[Ranks]:
        """Yield the steps that are ready, in order. Leave out steps that only one rank has completed.

        A step is ready if every rank has completed it, or after `LATE` seconds. If `_MAX_OPEN` steps are not
        ready, the oldest of them is yielded, too.

        With ``final``, no rank will complete another step, so all steps are ready.
        """
        too_late = time.monotonic() - LATE
        while self._open:
            start = min(self._open)
            bucket = self._open[start]
            waits = bucket.since > too_late and len(self._open) < _MAX_OPEN
            if waits and not final and not self._is_complete(start):
                return
            del self._open[start]
            self._after = max(self._after, bucket.step)
            if len(bucket.ranks) > 1:
                yield bucket.combined(self._world_size)

    def _is_complete(self, start: int) -> bool:
        if len(self._last) < self._world_size:
            return False  # a rank may have begun to train before its run was found
        return all(
            self._start(step + 1) > start
            for rank, step in self._last.items()
            if rank not in self._ended
        )

    def _start(self, step: int) -> int:
        return self._initial + bucket_start(step - self._initial)


class _Bucket:
    """Values of one step, or of one range of steps, by rank."""

    def __init__(self, since: float) -> None:
        self.since = since
        self.step = self.time_us = 0
        self.ranks: dict[int, dict[str, int]] = {}

    def add(self, rank: int, event: Batch) -> None:
        self.step = max(self.step, event.step)
        self.time_us = max(self.time_us, event.time_us)
        held = self.ranks.setdefault(rank, {})
        for name, size in _sizes(event):
            held[name] = max(size, held.get(name, size))

    def combined(self, world_size: int) -> Ranks:
        names = dict.fromkeys(name for sizes in self.ranks.values() for name in sizes)
        spreads = (self._spread(name) for name in names)
        return Ranks(
            self.time_us,
            self.step,
            len(self.ranks),
            world_size,
            tuple(spread for spread in spreads if spread is not None),
        )

    def _spread(self, name: str) -> RankSpread | None:
        known = [(sizes[name], rank) for rank, sizes in self.ranks.items() if name in sizes]
        if len(known) < len(self.ranks):
            return None  # a mean of some ranks only would be a wrong figure
        # If several ranks have the same value, the result names the lowest rank.
        smallest, smallest_rank = min(known)
        largest, of_largest = max((size, -rank) for size, rank in known)
        mean = sum(size for size, _ in known) / len(known)
        return RankSpread(name, smallest, smallest_rank, mean, largest, -of_largest)


def _sizes(event: Batch) -> Iterator[tuple[str, int]]:
    """Yield the known bytes of each kind of memory. The bytes of a rank's devices are added up."""
    step_readings = list(readings(event))
    allocated = [reading for reading in step_readings if reading.name.endswith(ALLOCATED)]
    kinds = {
        "host/rss": [reading.level for reading in step_readings if reading.name == HOST_RSS],
        "device/allocated": [reading.level for reading in allocated],
        "device/reserved": [
            reading.level for reading in step_readings if reading.name.endswith(RESERVED)
        ],
        "device/peak": [reading.peak for reading in allocated],
    }
    for name, sizes in kinds.items():
        known = [size for size in sizes if size is not None]
        # A sum over some of the devices would be a wrong figure.
        if known and len(known) == len(sizes):
            yield name, sum(known)


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
        stalled = {rank: why for rank in self._ranks if (why := self._why(rank, state_of))}
        if len(stalled) == len(self._ranks):
            return
        for rank, why in stalled.items():
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

"""Time that a search may take on the training thread."""

from __future__ import annotations

import math
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import TypeVar

_SHARE = 0.01
_BATCH = 20_000
_FREE_SECONDS, _EARNED = 0.5, 0.03
_Item = TypeVar("_Item")


def seconds_allowed(least: float, begun: float) -> float:
    """Return the seconds that a kind of work may take: 1 % of the run's time so far, at least ``least``.

    ``begun`` is the start of the run in seconds, as `time.monotonic` returns it.
    """
    return max(least, _SHARE * (time.monotonic() - begun))


class EarnedTime:
    """Processor time for all searches of a run together: half a second, and 3 % of what the run takes itself.

    A search is begun whole or not at all: what it has looked at is of no use without the rest.
    """

    def __init__(self) -> None:
        self._began = time.process_time()
        self._taken = self._longest = 0.0

    @property
    def is_enough(self) -> bool:
        """True if another search, as long as the longest so far, may begin. The first always may."""
        earned = _FREE_SECONDS + _EARNED * (time.process_time() - self._began)
        return self._longest == 0.0 or self._taken + self._longest <= earned

    def take(self, seconds: float) -> None:
        """Count a search that has taken ``seconds``."""
        self._taken += seconds
        self._longest = max(self._longest, seconds)


class TimeBudget:
    """Time limit, in seconds, for several pieces of work together.

    The thread's own processor time counts, so that a busy machine does not cut the work short.
    """

    def __init__(self, seconds: float) -> None:
        self._left = seconds
        self._most = math.inf
        self._began: float | None = None

    @contextmanager
    def running(self, most: float = math.inf) -> Iterator[None]:
        """Count the time of a block. After ``most`` seconds, `spent` is true until the block ends."""
        self._began, self._most = time.thread_time(), most
        try:
            yield
        finally:
            self._left -= self._taken()
            self._began, self._most = None, math.inf

    def take(self, seconds: float) -> None:
        """Subtract the processor seconds that other work has taken."""
        self._left -= seconds

    @property
    def left_in_all(self) -> float:
        """Seconds left for the running block and later blocks; negative if the work took too long."""
        return self._left - self._taken()

    def _taken(self) -> float:
        return 0.0 if self._began is None else time.thread_time() - self._began

    @property
    def spent(self) -> bool:
        """True if no time is left for the running block, or for all blocks together."""
        return min(self.left_in_all, self._most - self._taken()) <= 0

    def batches(self, items: Sequence[_Item]) -> Iterator[Sequence[_Item]]:
        """Yield slices of ``items`` until the time is spent."""
        for start in range(0, len(items), _BATCH):
            if self.spent:
                return
            yield items[start : start + _BATCH]

"""Sign that memory rises again and again, with many steps in between, such as at each evaluation.

The test of growth (`memlog.growth`) needs a trend that lasts, and an early rise (`memlog.facts.early_rise`)
an even one. A rise every 200 steps is neither for a long time. So two lasting rises of about the same size
are a sign, too. It is no finding: a search for the cause begins.
"""

from __future__ import annotations

from collections import deque

from memlog.events import ALLOCATED, HOST_ANON, Batch
from memlog.facts.early_rise import DEVICE_LEAST, HOST_LEAST, Rise

_WARM_UP = 5
"""Number of first levels that do not count."""
_LOWEST_OF = 3
"""Number of newest levels whose lowest one counts. A shorter peak is no rise."""
_ONE = 6
"""Rises within this number of steps are one."""
_APART = 12
"""Minimum number of steps between two rises."""
_PATTERN = 2
"""Number of rises that are compared."""
_ALIKE = 1.6
"""Maximum ratio of the sizes of two rises."""
_AGAIN = 1_500
"""Number of steps after a sign before another one. A search takes at most so many."""
_MAX_SIGNS = 3


class RepeatedRise:
    """Watch over one series. ``least`` is the smallest rise in bytes that counts."""

    def __init__(self, least: int) -> None:
        self._least = least
        self._newest: deque[int] = deque(maxlen=_LOWEST_OF)
        self._count = 0
        self._level: int | None = None
        self._rises: list[tuple[int, int]] = []
        """First step and size of the two newest rises."""
        self._risen_at = 0
        self._is_new = False
        self._quiet_until = 0
        self._signs = 0

    def take(self, step: int, level: int) -> Rise | None:
        """Take the level after a step. Return the rise if two lasting ones of about one size have come."""
        self._newest.append(level)
        self._count += 1
        low = min(self._newest)
        if self._level is None or self._count <= _WARM_UP + _LOWEST_OF:
            self._level = low
        elif low >= self._level + self._least:
            self._add(step, low - self._level)
            self._level = low
        elif max(self._newest) < self._level - self._least:
            self._rises.clear()  # they have not lasted
            self._level = max(self._newest)
        elif self._is_new and step >= self._risen_at + _ONE:
            self._is_new = False
            return self._pattern(step, low)
        return None

    def _add(self, step: int, size: int) -> None:
        if self._rises and step <= self._risen_at + _ONE:
            begun, before = self._rises.pop()
            self._rises.append((begun, before + size))
        else:
            self._rises = [*self._rises[-1:], (step, size)]
        self._risen_at, self._is_new = step, True

    def _pattern(self, step: int, level: int) -> Rise | None:
        if len(self._rises) < _PATTERN or self._signs >= _MAX_SIGNS or step < self._quiet_until:
            return None
        (before, first), (after, second) = self._rises
        apart = after - before
        if apart < _APART or max(first, second) > _ALIKE * min(first, second):
            return None
        self._signs += 1
        self._quiet_until = step + _AGAIN
        return Rise(before, after, level, second / apart)


class RepeatedRises:
    """Watch over the memory of a process and of its devices."""

    def __init__(self) -> None:
        self._watches: dict[str, RepeatedRise] = {}

    def take(self, event: Batch) -> tuple[str, Rise] | None:
        """Take a step. Return the name of a series that rises repeatedly, and its rise per step."""
        found = None
        if event.rss_anon is not None:
            found = self._take(HOST_ANON, event.step, event.rss_anon, HOST_LEAST)
        for device in event.devices:
            if device.allocated is not None:
                name = device.name + ALLOCATED
                found = self._take(name, event.step, device.allocated, DEVICE_LEAST) or found
        return found

    def _take(self, name: str, step: int, level: int, least: int) -> tuple[str, Rise] | None:
        watch = self._watches.get(name)
        if watch is None:
            watch = self._watches[name] = RepeatedRise(least)
        rise = watch.take(step, level)
        return None if rise is None else (name, rise)

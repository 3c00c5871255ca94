"""Signs that memory keeps rising, or rises again and again, before the growth test has judged.

A process can die before the test of growth (`memlog.growth`) has enough levels. So one search for the cause
begins as soon as the lowest levels of a few blocks of steps rise evenly. This takes much fewer levels, is
less certain, and is no finding: what the search finds is a suspect until the growth is confirmed.

This module is used in the training process, too. A level costs two comparisons.

The test of growth (`memlog.growth`) needs a trend that lasts, and an early rise (`memlog.facts.rises`)
an even one. A rise every 200 steps is neither for a long time. So two lasting rises of about the same size
are a sign, too, and three of any size: what else a program does can hide a part of a rise. It is no finding:
a search for the cause begins.
"""

from __future__ import annotations

from collections import deque
from itertools import pairwise
from typing import NamedTuple

from memlog.events import ALLOCATED, HOST_ANON, Batch

_BLOCK = 3
"""Number of levels in a block of the finest scale. The first block, of the warm-up, does not count."""
_WIDER = 4
"""Number of blocks of one scale that are one block of the next scale."""
_SCALES = 3
_BLOCKS = 5
"""Number of blocks whose lowest levels are compared."""
_EVEN = 0.3
"""Each rise from block to block must be at least this part of the mean rise."""
_FAST_BLOCKS = 3
"""Number of blocks that are enough if the level rises by the least rise from each to the next."""

HOST_LEAST = 4 * 1024**2
DEVICE_LEAST = 1024**2
"""Smallest rises of a device's memory, and `HOST_LEAST` of the process's memory, that count."""


class Rise(NamedTuple):
    """Rise of a series. Sizes are bytes."""

    since: int
    step: int
    level: int
    rate: float
    """Bytes per step."""


class EarlyRise:
    """Watch over one series. ``least`` is the smallest rise in bytes that counts."""

    def __init__(self, least: int) -> None:
        self._least = least
        self._lowest = self._count = 0
        self._scales = [_Scale() for _ in range(_SCALES)]
        self._begun = False

    def take(self, step: int, level: int) -> Rise | None:
        """Take the level after a step. Return the rise, if the series rises evenly."""
        count = self._count
        if not count or level < self._lowest:
            self._lowest = level
        self._count = count + 1
        if count < _BLOCK - 1:
            return None
        self._count = 0
        return self._take_block(step, self._lowest)

    def _take_block(self, step: int, lowest: int) -> Rise | None:
        if not self._begun:
            self._begun = True
            return None
        rise: Rise | None = None
        for scale in self._scales:
            rise = rise or scale.take(step, lowest, self._least)
            if len(scale.pending) < _WIDER:
                break
            lowest = min(scale.pending)
            scale.pending.clear()
        return rise


class EarlyRises:
    """Watch over the memory of a process and of its devices."""

    def __init__(self) -> None:
        self._watches: dict[str, EarlyRise] = {}

    def take(self, event: Batch) -> tuple[str, Rise] | None:
        """Take a step. Return the name of a series that rises evenly, and its rise."""
        if event.rss_anon is not None:
            risen = self._take(HOST_ANON, event.step, event.rss_anon, HOST_LEAST)
            if risen is not None:
                return risen
        for device in event.devices:
            if device.allocated is not None:
                name = device.name + ALLOCATED
                risen = self._take(name, event.step, device.allocated, DEVICE_LEAST)
                if risen is not None:
                    return risen
        return None

    def _take(self, name: str, step: int, level: int, least: int) -> tuple[str, Rise] | None:
        watch = self._watches.get(name)
        if watch is None:
            watch = self._watches[name] = EarlyRise(least)
        rise = watch.take(step, level)
        if rise is None:
            return None
        # The next rise counts from here on, without the levels of this one.
        del self._watches[name]
        return name, rise


class _Scale:
    def __init__(self) -> None:
        self.pending: list[int] = []
        self._blocks: list[tuple[int, int]] = []

    def take(self, step: int, lowest: int, least: int) -> Rise | None:
        self.pending.append(lowest)
        blocks = self._blocks
        blocks.append((step, lowest))
        del blocks[:-_BLOCKS]
        fast = blocks[-_FAST_BLOCKS:]
        if len(fast) == _FAST_BLOCKS and _smallest_rise(fast) >= least:
            return _rise(fast)
        if len(blocks) == _BLOCKS:
            total = lowest - blocks[0][1]
            if total >= least and _smallest_rise(blocks) >= _EVEN * total / (_BLOCKS - 1):
                return _rise(blocks)
        return None


def _smallest_rise(blocks: list[tuple[int, int]]) -> int:
    levels = [level for _, level in blocks]
    return min(after - before for before, after in pairwise(levels))


def _rise(blocks: list[tuple[int, int]]) -> Rise:
    (since, before), (step, level) = blocks[0], blocks[-1]
    return Rise(since, step, level, (level - before) / (step - since))


_WARM_UP = 5
"""Number of first levels that do not count."""
_LOWEST_OF = 3
"""Number of newest levels whose lowest one counts. A shorter peak is no rise."""
_ONE = 6
"""Rises within this number of steps are one."""
_APART = 12
"""Minimum number of steps between two rises."""
_ALIKE = 1.6
"""Maximum ratio of the sizes of two rises."""
_ANY = 3
"""Number of rises whose sizes need not be alike."""
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
        """First step and size of the newest rises."""
        self._risen_at = 0
        self._is_new = False
        self._quiet_until = 0
        self._signs = 0

    def take(self, step: int, level: int) -> Rise | None:
        """Take the level after a step. Return the smallest of some lasting rises if they are a sign."""
        self._newest.append(level)
        self._count += 1
        low = min(self._newest)
        if self._level is None or self._count <= _WARM_UP + _LOWEST_OF:
            self._level = low
        elif low >= self._level + self._least:
            self._add(step, low - self._level)
            self._level = low
        # The highest of them: one low level takes nothing back.
        elif max(self._newest) < self._level - self._least:
            self._take_back(self._level - max(self._newest))
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
            self._rises = [*self._rises[1 - _ANY :], (step, size)]
        self._risen_at, self._is_new = step, True

    def _take_back(self, size: int) -> None:
        """Forget what has not lasted: a fall of ``size`` bytes takes back the newest rises, or a part."""
        while self._rises and size > 0:
            begun, risen = self._rises.pop()
            if risen - size >= self._least:
                self._rises.append((begun, risen - size))
                return
            size -= risen
            self._is_new = False

    def _pattern(self, step: int, level: int) -> Rise | None:
        if len(self._rises) < 2 or self._signs >= _MAX_SIGNS or step < self._quiet_until:  # noqa: PLR2004
            return None
        compared = self._rises[-2:]
        sizes = [size for _, size in compared]
        if max(sizes) > _ALIKE * min(sizes):
            compared = self._rises
            if len(compared) < _ANY:
                return None
        steps = [risen_at for risen_at, _ in compared]
        if min(after - before for before, after in pairwise(steps)) < _APART:
            return None
        self._signs += 1
        self._quiet_until = step + _AGAIN
        smallest = min(size for _, size in compared)
        return Rise(steps[0], steps[-1], level, smallest / (steps[-1] - steps[0]))


class RepeatedRises:
    """Watch over the memory of a process and of its devices."""

    def __init__(self) -> None:
        self._watches: dict[str, RepeatedRise] = {}

    def take(self, event: Batch) -> tuple[str, Rise] | None:
        """Take a step. Return the name of a series that rises repeatedly, and its smallest rise."""
        risen = None
        if event.rss_anon is not None:
            risen = self._take(HOST_ANON, event.step, event.rss_anon, HOST_LEAST)
        for device in event.devices:
            if device.allocated is not None:
                name = device.name + ALLOCATED
                risen = self._take(name, event.step, device.allocated, DEVICE_LEAST) or risen
        return risen

    def _take(self, name: str, step: int, level: int, least: int) -> tuple[str, Rise] | None:
        watch = self._watches.get(name)
        if watch is None:
            watch = self._watches[name] = RepeatedRise(least)
        rise = watch.take(step, level)
        return None if rise is None else (name, rise)

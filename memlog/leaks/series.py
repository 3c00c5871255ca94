"""One series of memory levels at step ends: decides when its growth is suspected, confirmed or withdrawn.

Growth is *suspected* after a few dozen steps, so that its cause can be looked for. A cache that fills and a
swing that rises look the same for a while. So growth is *confirmed* only when later levels, which the
suspicion did not know, continue it for long enough, or when the run ends and it still lasts. The wait is
the shorter, the sooner memory is full. Otherwise the suspicion is *withdrawn*.
"""

from __future__ import annotations

from itertools import pairwise
from typing import Literal, NamedTuple, TypeAlias

from memlog._internal.units import MIB
from memlog.growth import MOST, Growth, LevelWindow, find_growth
from memlog.leaks.forecast import steps_left

Verdict: TypeAlias = Literal["suspected", "confirmed", "withdrawn"]

_SCALES = 3
"""Windows, each four times as long as the one before: the last covers 2,048 levels."""
_SHARE = 0.02 / 100
"""Share of the level by which it has to grow per step to matter: 2 % in 100 steps."""
_ENOUGH = MIB / 2
"""Growth per step that matters at any level."""
_SOON = 20_000
"""Steps: growth that reaches the limit within them matters."""
_PART = 16
"""A window is judged again when one of so many parts is new."""
_NEW = 4
"""Fewest new levels by which a window is judged again, and steps by which growth is confirmed."""
_SLOWEST = 0.5
"""Share of the suspected rate that the whole growth has to reach to be confirmed."""
LARGER = 2.0
"""Factor over the rate reported last from which growth is reported again."""
_SHORT = 4
"""Fewest levels of a series that ended early."""
_WAIT = (64, 256)
"""Fewest and most further levels' steps until growth is confirmed."""


class News(NamedTuple):
    """Change of what is known about a series."""

    verdict: Verdict
    growth: Growth


class SeriesWatch:
    """State of one series.

    Args:
        floor: Least growth in the whole regime, in bytes. Allocators take memory in pieces of such a size.
        least: Fewest levels by which growth is judged.
    """

    __slots__ = ("_due", "_floor", "_least", "_pending", "_reported", "_windows", "free")

    def __init__(self, floor: float, least: int = 24) -> None:
        self._floor = floor
        self._least = least
        self._windows = [LevelWindow() for _ in range(_SCALES)]
        self._pending: Growth | None = None
        self._due = 0
        self._reported = 0.0
        self.free: float | None = None
        """Bytes left until the limit, when last known; ``None`` if unknown."""

    @property
    def pending(self) -> Growth | None:
        """Growth that is suspected and not yet confirmed."""
        return self._pending

    @property
    def read(self) -> int:
        """Number of newest levels that are kept."""
        return len(self._windows[0].levels)

    def take(self, step: int, level: float) -> News | None:
        """Take the level at the end of a step; return what changed."""
        finest = self._windows[0]
        if finest.indexes and step <= finest.indexes[-1]:
            if step == finest.indexes[-1]:
                finest.lower(level)
                return None
            self.clear()  # the steps are counted anew
        joined: float | None = level
        grown: Growth | None = None
        for window in self._windows:
            if joined is None:
                break
            window.add(step, joined)
            if grown is None and self._pending is None and self._is_due(window):
                grown = self._judge(window)
            joined = window.joined()
        if self._pending is not None:
            return self._decide(step) if step >= self._due else None
        return None if grown is None else self._suspect(grown, step)

    def end(self) -> News | None:
        """Judge a last time, because no more levels come: return growth that lasts until now."""
        suspected = self._pending
        found = self._confirmable()
        self._pending = None
        if found is None or (suspected is not None and not _continues(found, suspected)):
            return None if suspected is None else News("withdrawn", suspected)
        return self._confirmed(found, suspected)

    def short_growth(self) -> Growth | None:
        """Return the growth of a series with few levels, each of which is clearly above the one before."""
        window = self._windows[0]
        held = len(window.levels)
        if not _SHORT <= held < self._least:
            return None
        since, level = window.indexes[0], window.levels[-1]
        total, span = level - window.levels[0], window.indexes[-1] - since
        wanted = self._wanted(level)
        rates = [
            (after - before) / (end - begin)
            for (begin, before), (end, after) in pairwise(
                zip(window.indexes, window.levels, strict=True)
            )
        ]
        if total < self._floor or min(rates) < max(wanted, total / span * _SLOWEST):
            return None
        return Growth(since, total / span, min(rates), max(rates), level, total)

    def drop(self) -> None:
        """Withdraw the suspicion: something else explains the growth so far."""
        self._pending = None
        self.clear()

    def wait_on(self, growth: Growth) -> None:
        """Take confirmed growth as suspected again, to be confirmed by later levels."""
        self._pending, self._reported = growth, 0.0
        self.delay()

    def clear(self) -> None:
        """Remove all levels."""
        for window in self._windows:
            window.clear()

    def _is_due(self, window: LevelWindow) -> bool:
        """Return True if a window has enough new levels, and they are above older ones."""
        levels = window.levels
        held = len(levels)
        if held < self._least or window.unseen < max(held // _PART, _NEW):
            return False
        window.unseen = 0
        return levels[-1] > levels[-self._least]

    def _judge(self, window: LevelWindow) -> Growth | None:
        """Return the growth of a window's newest regime, if it matters and is news."""
        level = window.levels[-1]
        wanted = max(self._wanted(level), LARGER * self._reported)
        found = find_growth(list(window.indexes), list(window.levels), wanted, self._least)
        if found is None or found.total < self._floor or self._was_there(found):
            return None
        return found

    def _wanted(self, level: float) -> float:
        """Return the least growth per step that matters."""
        wanted = min(max(_SHARE * level, 1.0), _ENOUGH)
        return wanted if self.free is None else min(wanted, max(self.free / _SOON, 1.0))

    def _was_there(self, growth: Growth) -> bool:
        """Return True if the level was as high before the growth began: a swing that rises again."""
        for window in self._windows[1:]:
            before = [
                level
                for index, level in zip(window.indexes, window.levels, strict=True)
                if index < growth.since
            ]
            if before and max(before) > growth.level - growth.total / 4:
                return True
        return False

    def _suspect(self, growth: Growth, step: int) -> News:
        self._pending = growth
        self._due = step + self._wait(growth)
        return News("suspected", growth)

    def delay(self) -> None:
        """Choose the wait for further levels anew, by the memory that is left now."""
        if self._pending is not None:
            self._due = self._windows[0].indexes[-1] + self._wait(self._pending)

    def _wait(self, growth: Growth) -> int:
        fewest, most = _WAIT
        if self.free is None:
            return most // 2
        soonest, _ = steps_left(growth, self.free)
        return int(min(max(soonest / 8, fewest), most, max(soonest / 4, _NEW)))

    def _decide(self, step: int) -> News | None:
        """Judge a suspicion by all levels since it began."""
        suspected = self._pending
        found = self._confirmable()
        if suspected is None:
            return None
        if found is None or not _continues(found, suspected):
            self._pending = None
            return News("withdrawn", suspected)
        if found.since > self._windows[0].indexes[-1] - (step - suspected.since) // 2:
            self._pending = found  # a new regime, which has to last, too
            self._due = step + self._wait(found)
            return None
        self._pending = None
        return self._confirmed(found, suspected)

    def _confirmed(self, found: Growth, suspected: Growth | None) -> News:
        self._reported = found.rate
        if suspected is not None:
            found = found._replace(since=min(found.since, suspected.since))
        return News("confirmed", found)

    def _confirmable(self) -> Growth | None:
        """Return the growth in the finest window that covers what is suspected; ``None``: no growth."""
        since = None if self._pending is None else self._pending.since
        for window in self._windows:
            if len(window.levels) < self._least:
                break
            whole = len(window.levels) < MOST
            if since is None or whole or window.indexes[0] <= since:
                return self._judge(window)
        return None


def _continues(found: Growth, suspected: Growth) -> bool:
    return found.rate >= _SLOWEST * suspected.rate

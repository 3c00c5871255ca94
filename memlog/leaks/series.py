"""One series of memory levels at step ends: decides when its growth is suspected, confirmed or withdrawn.

Growth is *suspected* after a few dozen steps, so that its cause can be looked for. The search takes time, so
growth has to be found twice before: most warm-ups and caches that fill have ended by then. Larger caches and
a swing that rises look the same for a while. So growth is *confirmed* only if later levels, which the
suspicion did not know, continue it for long enough, or if it still lasts when the run ends. Levels that an
allocator's unused blocks make too noisy are judged without these blocks. Otherwise the suspicion is
*withdrawn*. The sooner memory is full, the shorter are all waits.
"""

from __future__ import annotations

from collections import deque
from itertools import pairwise
from typing import Literal, NamedTuple, TypeAlias

from memlog._internal.units import MIB
from memlog.growth import SIGMAS, Growth, LevelScales, LevelWindow, find_growth
from memlog.growth.line import line_through
from memlog.leaks.forecast import steps_left

Verdict: TypeAlias = Literal["suspected", "confirmed", "withdrawn"]

_SHARE = 0.02 / 100
"""Growth per step that matters, as a share of the level: 2 % in 100 steps."""
_ENOUGH = MIB / 2
"""Growth per step that matters at any level."""
_SOON = 20_000
"""Steps: growth that reaches the limit within them matters."""
_PART = 16
"""Number of equal parts of a window. It is judged again when one part is new."""
_NEW = 4
"""Fewest new levels for which a window is judged again, and the shortest wait in steps."""
_SLOWEST = 0.5
"""Share of the suspected rate that the whole growth has to reach to be confirmed."""
LARGER = 2.0
"""Factor over the rate reported last from which growth is reported again."""
_SUSPECTED = 3
"""Standard deviations of the levels that a suspected growth has to exceed. They are fewer than for confirmed
growth, so that the search for the cause begins early enough in noisy levels."""
_LATER = 16
"""Fewest levels after growth was noticed by which the growth is judged."""
_IN_USE = 256
"""Number of newest levels, without unused blocks, to keep."""
_SHORT = 4
"""Fewest levels of a series that ended early."""
_AGAIN = 16
"""Steps after which growth has to be found again to be suspected."""
_WAIT = (64, 256)
"""Fewest and most steps from the suspicion until growth is confirmed."""


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

    __slots__ = (
        "_due",
        "_floor",
        "_found",
        "_found_at",
        "_is_told",
        "_least",
        "_levels",
        "_reported",
        "free",
        "in_use",
    )

    def __init__(self, floor: float, least: int = 24) -> None:
        self._floor = floor
        self._least = least
        self._levels = LevelScales()
        self._found: Growth | None = None
        self._found_at = self._due = 0
        self._is_told = False
        self._reported = 0.0
        self.free: float | None = None
        """Bytes left until the limit, when last known; ``None`` if unknown."""
        self.in_use: deque[tuple[int, int]] = deque(maxlen=_IN_USE)
        """Steps since growth was suspected, each with its level without the allocator's unused blocks."""

    @property
    def pending(self) -> Growth | None:
        """Growth that is suspected and not yet confirmed."""
        return self._found if self._is_told else None

    @property
    def read(self) -> int:
        """Number of newest levels that are kept."""
        return len(self._levels.finest.levels)

    def take(self, step: int, level: float) -> News | None:
        """Take the level at the end of a step; return what changed."""
        finest = self._levels.finest
        if finest.indexes and step <= finest.indexes[-1]:
            if step == finest.indexes[-1]:
                finest.lower(level)
                return None
            self._levels.clear()  # the steps are counted anew
        added = self._levels.add(step, level)
        if self._found is None:
            grown = (
                self._judge(window, _SUSPECTED) for window in added if _is_due(window, self._least)
            )
            growth = next((one for one in grown if one is not None), None)
            if growth is not None:
                self._begin(growth, step)
        if self._found is None or step < self._due:
            return None
        return self._decide(step, self._found) if self._is_told else self._suspect(self._found)

    def end(self) -> News | None:
        """Judge a last time, because no more levels come: return growth that lasts until now."""
        suspected, self._is_told = self.pending, False
        found, self._found = self._growth_since(self._found, SIGMAS), None
        if found is None or (
            suspected is not None and not _goes_on(self._levels, self._found_at, found, suspected)
        ):
            return None if suspected is None else self._decide_by_use(suspected)
        return self._confirmed(found, suspected)

    def short_growth(self) -> Growth | None:
        """Return the growth of a series with few levels, each of which is clearly above the one before."""
        window = self._levels.finest
        held = len(window.levels)
        if not _SHORT <= held < self._least:
            return None
        since, level = window.indexes[0], window.levels[-1]
        total, span = level - window.levels[0], window.indexes[-1] - since
        wanted = _wanted(level, self.free)
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
        self._found, self._is_told = None, False
        self._levels.clear()

    def wait_on(self, growth: Growth) -> None:
        """Take confirmed growth as suspected again, to be confirmed by later levels."""
        self._reported = 0.0
        self._begin(growth, self._levels.finest.indexes[-1], is_told=True)

    def delay(self) -> None:
        """Choose the wait for further levels anew, by the memory that is left now."""
        if self._found is not None:
            self._due = self._found_at + _wait(self._found, self.free, self._is_told)

    def _judge(self, window: LevelWindow, sigmas: float) -> Growth | None:
        """Return the growth of a window's newest regime, if it matters and is news."""
        level = window.levels[-1]
        wanted = max(_wanted(level, self.free), LARGER * self._reported)
        found = find_growth(list(window.indexes), list(window.levels), wanted, self._least, sigmas)
        if found is None or found.total < self._floor:
            return None
        before = self._levels.highest_before(found.since)
        # If the level was as high before the growth began, it is a swing that rises again.
        return None if before is not None and before > found.level - found.total / 4 else found

    def _begin(self, growth: Growth, step: int, *, is_told: bool = False) -> None:
        self._found, self._found_at, self._is_told = growth, step, is_told
        if not is_told:
            self.in_use.clear()
        self._due = step + _wait(growth, self.free, is_told)

    def _suspect(self, before: Growth) -> News | None:
        """Suspect growth that was found once, if all levels since it began still show it."""
        found = self._growth_since(before, _SUSPECTED)
        self._found = found if found is not None and _continues(found, before) else None
        if self._found is None:
            return None
        self._is_told = True
        self.delay()
        return News("suspected", self._found)

    def _decide(self, step: int, suspected: Growth) -> News | None:
        """Judge a suspicion by all levels since it began."""
        found = self._growth_since(suspected, SIGMAS)
        if found is not None and _goes_on(self._levels, self._found_at, found, suspected):
            if found.since > step - (step - suspected.since) // 2:
                self._begin(found, step, is_told=True)  # a new regime, which has to last, too
                return None
            self._found, self._is_told = None, False
            return self._confirmed(found, suspected)
        self._found, self._is_told = None, False
        return self._decide_by_use(suspected)

    def _decide_by_use(self, suspected: Growth) -> News:
        """Judge growth that the levels do not confirm, by levels without unused blocks: these vary less."""
        if len(self.in_use) >= _LATER:
            steps, levels = zip(*self.in_use, strict=True)
            found = find_growth(steps, levels, _SLOWEST * suspected.rate, _LATER)
            if found is not None and found.total >= self._floor:
                level = self._levels.finest.levels[-1]
                return self._confirmed(
                    found._replace(since=suspected.since, level=level), suspected
                )
        return News("withdrawn", suspected)

    def _confirmed(self, found: Growth, suspected: Growth | None) -> News:
        self._reported = found.rate
        if suspected is not None:
            found = found._replace(since=min(found.since, suspected.since))
        return News("confirmed", found)

    def _growth_since(self, growth: Growth | None, sigmas: float) -> Growth | None:
        """Return the growth in the finest window that covers a known growth; ``None``: none."""
        window = self._levels.covering(None if growth is None else growth.since, self._least)
        return None if window is None else self._judge(window, sigmas)


def _wanted(level: float, free: float | None) -> float:
    """Return the least growth per step that matters."""
    wanted = min(max(_SHARE * level, 1.0), _ENOUGH)
    return wanted if free is None else min(wanted, max(free / _SOON, 1.0))


def _wait(growth: Growth, free: float | None, is_suspected: bool) -> int:
    """Return the steps until growth is judged again, to suspect it or, if it is suspected, to confirm it."""
    fewest, most = _WAIT if is_suspected else (0, _AGAIN)
    if free is None:
        return most // 2 if is_suspected else most
    soonest, _ = steps_left(growth, free)
    return int(min(max(soonest / 8, fewest), most, max(soonest / 4, _NEW)))


def _is_due(window: LevelWindow, least: int) -> bool:
    """Return True if a window has enough new levels, and they are above older ones."""
    levels = window.levels
    held = len(levels)
    if held < least or window.unseen < max(held // _PART, _NEW):
        return False
    window.unseen = 0
    return levels[-1] > levels[-least]


def _goes_on(levels: LevelScales, since: int, found: Growth, suspected: Growth) -> bool:
    """Return True if growth has continued, both in all levels and in those after it was noticed.

    Only the later levels had no part in the choice of this series.

    Args:
        levels: The series.
        since: Step at which its growth was noticed.
        found: Its growth until now.
        suspected: Its growth when it was noticed.
    """
    if not _continues(found, suspected):
        return False
    window = levels.covering(since, _LATER)
    pairs = () if window is None else zip(window.indexes, window.levels, strict=True)
    later = [(index, level) for index, level in pairs if index > since]
    if len(later) < _LATER:
        return True
    return line_through(*zip(*later, strict=True)).rate >= _SLOWEST * found.rate


def _continues(found: Growth, suspected: Growth) -> bool:
    return found.rate >= _SLOWEST * suspected.rate

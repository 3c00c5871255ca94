"""Verdicts on one series of memory levels: its growth is suspected, confirmed or withdrawn.

Growth is *suspected* if two tests, a few steps apart, find it. The first test needs a few dozen steps. After
the second test, the search for the cause begins. The search takes time, so a single test is not enough: most
warm-ups end before the second test, and most caches are full by then.

Growth is *confirmed* if it continues for long enough after the suspicion, or if it still lasts when the run
ends. Otherwise the suspicion is *withdrawn*, for example if a large cache is full, or if the memory falls
again. If an allocator's unused blocks make the levels too noisy, memlog subtracts these blocks.

If memory will be full soon, the second test and the decision come earlier.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Sequence
from itertools import pairwise
from statistics import median
from typing import Literal, NamedTuple, TypeAlias

from memlog._internal.terminal import MIB
from memlog.growth.lasting import (
    SIGMAS,
    Growth,
    LevelScales,
    LevelWindow,
    find_growth,
    line_through,
)


class Suspicion(NamedTuple):
    """Growth of one series; sizes are bytes, rates are bytes per step."""

    series: str
    """Name of the series: ``host.anon`` (memory of the training process without mapped files and shared
    memory), ``host.free_lists`` (unused memory of the C library's allocator), ``shared_memory``,
    ``children.shared_memory``, ``cuda0.allocated``, ``cuda0.fragmented``, ``cuda0.private_pools``,
    ``child:DataLoader worker 3`` or ``processes:python`` (all child processes of one kind)."""
    since_step: int
    """First step of the growth."""
    rate: float
    rate_low: float
    rate_high: float
    """Upper end of the rate's 95 % interval. ``rate_low`` is the lower end."""
    level: int
    """Bytes of the series at ``step``."""
    limit: int | None
    """Bytes of the series when memory is full: ``level`` plus the free bytes. ``None`` if unknown."""
    step: int
    """Newest step when this object was made."""
    forecast: tuple[int, int] | None = None
    """Earliest and latest step at which memory will be full; ``None`` if unknown or too uncertain."""
    processes: int | None = None
    """Number of processes that were started during the growth and are still alive. ``None`` if such processes
    are not the cause of the growth."""
    others: int = 0
    """Number of other child processes of the same kind as the process in ``series``. ``rate`` and ``level``
    include the growth of these processes."""
    allocator: str | None = None
    """Settings of the device's allocator, as in `memlog.events.Device`; ``None`` if unknown or not about a
    device."""

    @property
    def rise(self) -> float:
        """Bytes of the growth so far."""
        return self.rate * (self.step - self.since_step)


_WIDEST = 2.0
"""Maximum ratio of the highest to the lowest estimate of the steps until the limit. Above this ratio, memlog
makes no forecast."""
_FURTHEST = 1_000_000
"""If the limit is more than this number of steps away, memlog makes no forecast, because such slow growth
does not matter."""


def steps_left(growth: Growth, free: float) -> tuple[float, float]:
    """Return the lowest and the highest estimate of the number of steps until ``free`` bytes are used.

    The estimates follow from the upper and the lower end of the confidence interval of the growth's rate.
    """
    return max(free, 0) / growth.high, max(free, 0) / growth.low


def forecast(growth: Growth, free: float | None, step: int) -> tuple[int, int] | None:
    """Return the two steps between which a limit will be reached, if the rate of growth does not change.

    Args:
        growth: Growth. If its rate can be zero, there is no forecast.
        free: Bytes left until the limit; ``None`` if unknown.
        step: Newest step.

    Returns:
        ``None`` if the limit is unknown or too far off, or if the two steps are too far apart to help.
    """
    if free is None or growth.low <= 0:
        return None
    fewest, most = steps_left(growth, free)
    if most > _WIDEST * max(fewest, 1.0) or fewest > _FURTHEST:
        return None
    return step + int(fewest), step + round(most)


_ENOUGH_STEPS = 12
"""Number of levels that must follow a gap before the gap is removed from the series."""

_JOINED = 6
"""Number of levels before a gap, and of levels after the gap, whose medians are compared."""


class StepLevel(NamedTuple):
    """Level at the end of a step, in bytes."""

    step: int
    level: int


class Gaps:
    """Remover of gaps from a series. A gap is a sequence of steps in which memlog's own search took memory.

    Each level after a gap is shifted: a number of steps and a number of bytes are subtracted. The shifted
    levels continue the levels before the gap.

    A search for holders takes tens of megabytes and leaves some of them free in the allocator. The program's
    growth then fills this free memory, and can't be seen for a while. So the levels in a gap are left out,
    except if the series ends in the gap or soon after it.
    """

    def __init__(self) -> None:
        self._shift = StepLevel(0, 0)
        """Steps and bytes to subtract from a measured level."""
        self._begins = [(0, 0)]
        """Pairs ``(step, count)``. From the shifted step ``step`` on, measured steps are larger by ``count``.
        The first pair is for the start of the series. Each further pair is for a gap."""
        self._newest: deque[StepLevel] = deque(maxlen=_JOINED)
        """The newest levels, minus `_shift`. During a gap, these are the last levels before the gap."""
        self._waiting: list[StepLevel] = []
        """Measured levels of the current gap and of the steps after the gap, until the gap is closed."""
        self._after = 0

    def take(self, step: int, level: int, *, left_out: bool) -> Sequence[StepLevel]:
        """Take a measured level. Return the levels that can be judged now. These levels have no gaps.

        ``left_out`` is true if the step belongs to a gap.
        """
        newest = StepLevel(step, level)
        if not self._waiting and not (left_out and self._newest):
            if len(self._begins) == 1:  # most series have no gap, and so no shift
                self._newest.append(newest)
                return (newest,)
            return [self._shifted(newest)]
        self._waiting.append(newest)
        self._after = 0 if left_out else self._after + 1
        if self._after < _ENOUGH_STEPS:
            return []
        return self._close(self._waiting[-_ENOUGH_STEPS:])

    def rest(self) -> Sequence[StepLevel]:
        """Return the levels that wait for the end of a gap. Call this method when the series may end.

        Later levels are not shifted because of this gap.
        """
        waiting, self._waiting = self._waiting, []
        return [self._shifted(step_level) for step_level in waiting]

    def measured(self, growth: Growth) -> Growth:
        """Undo the shift: return ``growth`` with its measured first step and its measured level."""
        # Newest first: the count of a gap includes those of the gaps before it.
        steps = next(steps for begin, steps in reversed(self._begins) if begin <= growth.since)
        return growth._replace(since=growth.since + steps, level=growth.level + self._shift.level)

    def _close(self, after: list[StepLevel]) -> list[StepLevel]:
        """Compute the shift that closes the gap. Return the shifted levels after the gap.

        The shift is the difference of two medians: the median of the first levels after the gap, minus the
        median of the last levels before the gap. Single levels are not compared, because they can be spikes.
        """
        count = len(self._newest)
        before = median(step_level.level for step_level in self._newest)
        level = median(step_level.level for step_level in after[:count])
        begin = self._newest[-1].step
        self._shift = StepLevel(after[count - 1].step - begin, int(level - before))
        self._begins.append((begin, self._shift.step))
        self._waiting = []
        return [self._shifted(step_level) for step_level in after[count:]]

    def _shifted(self, measured: StepLevel) -> StepLevel:
        shifted = StepLevel(measured.step - self._shift.step, measured.level - self._shift.level)
        self._newest.append(shifted)
        return shifted


Verdict: TypeAlias = Literal["suspected", "confirmed", "withdrawn"]

_SHARE = 0.02 / 100
"""Growth per step, as a fraction of the level: 2 % in 100 steps. Slower growth is ignored, unless
it reaches `_ENOUGH` bytes per step, or will fill the memory within `_SOON` steps."""
_ENOUGH = MIB / 2
"""Bytes per step. Growth of this rate or more is never ignored (see `_SHARE`)."""
_SOON = 20_000
"""Number of steps. Growth that will fill the memory within this number of steps is judged even if slow."""
_PART = 16
"""Divisor. A window with ``n`` levels is judged again after ``n / _PART`` new levels, but at least `_NEW`."""
_NEW = 4
"""Minimum number of new levels before a window is judged again. Also the minimum number of steps from the
suspicion to the decision, if memory will be full soon."""
_SLOWEST = 0.5
"""Minimum ratio of a growth's new rate to its old rate. If the ratio is lower, the growth has ended."""
LARGER = 2.0
"""Minimum ratio of a growth's rate to the rate in the last report. Below it, there is no further report."""
_SUSPECTED = 3
"""Growth that a suspicion requires, in standard deviations of the levels around the trend. A confirmation
requires more growth: `SIGMAS`. So the search for the cause begins early enough even if levels are noisy."""
_LATER = 16
"""Minimum number of levels for a separate test of the levels that came after growth was noticed. With fewer,
this test is skipped."""
_IN_USE = 256
"""Maximum length of `SeriesWatch.in_use`. Beyond it, a new level replaces the oldest."""
_SHORT = 4
"""Minimum number of levels for `SeriesWatch.short_growth`, which judges a series that ended early."""
_AGAIN = 16
"""Maximum number of steps between the first and the second test for growth. Growth is suspected only if both
tests find it."""
_WAIT = (64, 256)
"""Minimum and maximum number of steps from the suspicion until growth is confirmed or withdrawn. If memory
will be full soon, the number can be below the minimum."""


class News(NamedTuple):
    """New verdict on the growth of a series."""

    verdict: Verdict
    growth: Growth


class SeriesWatch:
    """Watch over the growth of one series.

    Args:
        floor: Bytes. Growth is ignored until the level has risen by this much since the growth began.
            Allocators take memory in pieces of about this size.
        least: Number of levels. With fewer, `take` and `end` find no growth.
    """

    def __init__(self, floor: float, least: int = 24) -> None:
        self.floor = floor
        self._least = least
        self._levels = LevelScales()
        self.finest = self._levels.finest
        """Window of the newest steps, with one level for each step."""
        self._found: Growth | None = None
        self._found_at = self._due = 0
        self._is_told = False
        self._reported = 0.0
        self.free: float | None = None
        """Newest known number of bytes left until the limit; ``None`` if unknown."""
        self.in_use: deque[tuple[int, int]] = deque(maxlen=_IN_USE)
        """Steps and levels since growth was suspected. The levels leave out the allocator's unused blocks."""

    @property
    def pending(self) -> Growth | None:
        """Growth that is suspected and not yet confirmed."""
        return self._found if self._is_told else None

    def take(self, step: int, level: float) -> News | None:
        """Take the level at the end of a step. Return a new verdict; ``None`` if there is none."""
        indexes = self.finest.indexes
        if indexes and step <= indexes[-1]:
            if step == indexes[-1]:
                self.finest.lower(level)
                return None
            self._levels.clear()  # the program's count of steps has begun again
        added = self._levels.add(step, level)
        if self._found is None:
            for window in added:
                growth = self._judge(window, _SUSPECTED) if _is_due(window, self._least) else None
                if growth is not None:
                    self._begin(growth, step)
                    break
        if self._found is None or step < self._due:
            return None
        return self._decide(step, self._found) if self._is_told else self._suspect(self._found)

    def end(self) -> News | None:
        """Judge the series a last time. Return a new verdict; ``None`` if there is none.

        Growth that has lasted until the newest level is confirmed. If `take` is called after this method,
        the search for growth begins again, with the same levels. Growth that was confirmed is then found
        again only at a much higher rate (`LARGER`).
        """
        suspected, self._is_told = self.pending, False
        growth, self._found = self._growth_since(self._found, SIGMAS), None
        if growth is None or (
            suspected is not None and not _goes_on(self._levels, self._found_at, growth, suspected)
        ):
            return None if suspected is None else self._decide_by_use(suspected)
        return self._confirmed(growth, suspected)

    def short_growth(self) -> Growth | None:
        """Return the growth of a series with few levels; ``None`` if it does not grow.

        The series grows if each level is clearly above the level before it.
        """
        window = self.finest
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
        if total < self.floor or min(rates) < max(wanted, total / span * _SLOWEST):
            return None
        return Growth(since, total / span, min(rates), max(rates), level, total)

    def drop(self) -> None:
        """Forget the suspicion and all levels. Call this if something harmless explains the growth so far."""
        self._found, self._is_told = None, False
        self._levels.clear()

    def wait_on(self, growth: Growth) -> None:
        """Treat confirmed growth as suspected again. Later levels can then confirm it again."""
        # Otherwise, only growth at twice the rate would be confirmed (`LARGER`).
        self._reported = 0.0
        self._begin(growth, self.finest.indexes[-1], is_told=True)

    def delay(self) -> None:
        """Recompute the step at which the growth is judged next. The step depends on `free`."""
        if self._found is not None:
            self._due = self._found_at + _wait(self._found, self.free, self._is_told)

    def _judge(self, window: LevelWindow, sigmas: float) -> Growth | None:
        """Return the growth that lasts until a window's newest level; ``None`` if there is none.

        Growth that is too small, or that was reported already, is left out.
        """
        level = window.levels[-1]
        wanted = max(_wanted(level, self.free), LARGER * self._reported)
        growth = find_growth(list(window.indexes), list(window.levels), wanted, self._least, sigmas)
        if growth is None or growth.total < self.floor:
            return None
        before = self._levels.highest_before(growth.since)
        # If a level before the growth was about as high as the newest, levels go up and down: this is no
        # leak.
        return None if before is not None and _was_as_high(before, growth) else growth

    def _begin(self, growth: Growth, step: int, *, is_told: bool = False) -> None:
        self._found, self._found_at, self._is_told = growth, step, is_told
        if not is_told:
            self.in_use.clear()
        self._due = step + _wait(growth, self.free, is_told)

    def _suspect(self, before: Growth) -> News | None:
        """Test growth a second time. If the second test finds growth, too, suspect the growth.

        The second test uses all levels since the growth began.
        """
        growth = self._growth_since(before, _SUSPECTED)
        self._found = growth if growth is not None and _continues(growth, before) else None
        if self._found is None:
            return None
        self._is_told = True
        self.delay()
        return News("suspected", self._found)

    def _decide(self, step: int, suspected: Growth) -> News | None:
        """Judge suspected growth by all levels since the growth began. Return a new verdict, if any."""
        growth = self._growth_since(suspected, SIGMAS)
        if growth is not None and _goes_on(self._levels, self._found_at, growth, suspected):
            if growth.since > step - (step - suspected.since) // 2:
                # `growth` began long after `suspected`. So `growth` must last, too, before it is confirmed.
                self._begin(growth, step, is_told=True)
                return None
            self._found, self._is_told = None, False
            return self._confirmed(growth, suspected)
        self._found, self._is_told = None, False
        return self._decide_by_use(suspected)

    def _decide_by_use(self, suspected: Growth) -> News:
        """Confirm or withdraw suspected growth by the levels in `in_use`.

        These levels vary less, because they leave out the allocator's unused blocks. Call this method if the
        levels passed to `take` do not confirm the growth.
        """
        if len(self.in_use) >= _LATER:
            steps, levels = zip(*self.in_use, strict=True)
            growth = find_growth(steps, levels, _SLOWEST * suspected.rate, _LATER)
            if (
                growth is not None
                and growth.total >= self.floor
                and not _is_again(growth, self.in_use)
            ):
                level = self.finest.levels[-1]
                return self._confirmed(
                    growth._replace(since=suspected.since, level=level), suspected
                )
        return News("withdrawn", suspected)

    def _confirmed(self, found: Growth, suspected: Growth | None) -> News:
        self._reported = found.rate
        if suspected is not None:
            found = found._replace(since=min(found.since, suspected.since))
        return News("confirmed", found)

    def _growth_since(self, growth: Growth | None, sigmas: float) -> Growth | None:
        """Return the growth that lasts until the newest level; ``None`` if there is none.

        Search all levels since ``growth`` began. If ``growth`` is ``None``, search the newest levels.
        """
        window = self._levels.covering(None if growth is None else growth.since, self._least)
        return None if window is None else self._judge(window, sigmas)


def _wanted(level: float, free: float | None) -> float:
    """Return the minimum growth in bytes per step: slower growth is ignored.

    ``level`` is the current level in bytes. ``free`` is the number of bytes left until the limit.
    """
    # At least 1: `find_growth` needs a rate above 0, and a level can be 0.
    wanted = min(max(_SHARE * level, 1.0), _ENOUGH)
    return wanted if free is None else min(wanted, max(free / _SOON, 1.0))


def _wait(growth: Growth, free: float | None, is_suspected: bool) -> int:
    """Return the number of steps until growth is tested a second time.

    With ``is_suspected``, return the number of steps until the growth is confirmed or withdrawn.
    """
    fewest, most = _WAIT if is_suspected else (0, _AGAIN)
    if free is None:
        return most // 2 if is_suspected else most
    soonest, _ = steps_left(growth, free)
    return int(min(max(soonest / 8, fewest), most, max(soonest / 4, _NEW)))


def _is_due(window: LevelWindow, least: int) -> bool:
    """Return True if a search for growth in a window is worth while.

    The window must have ``least`` levels, enough new levels, and a rise over the last ``least`` levels.
    """
    levels = window.levels
    held = len(levels)
    if held < least or window.unseen < max(held // _PART, _NEW):
        return False
    # Also if the check below fails: the next check needs new levels, too.
    window.unseen = 0
    return levels[-1] > levels[-least]


def _was_as_high(before: float, found: Growth) -> bool:
    """Return True if a level before the growth was about as high as the newest."""
    return before > found.level - found.total / 4


def _is_again(found: Growth, levels: Iterable[tuple[int, float]]) -> bool:
    """Return True if the levels fell before the growth, such as at the end of an epoch."""
    before = [level for step, level in levels if step < found.since]
    return bool(before) and _was_as_high(max(before), found)


def _goes_on(levels: LevelScales, since: int, found: Growth, suspected: Growth) -> bool:
    """Return True if two tests show that growth has continued.

    The first test uses all levels since the growth began. The second test uses only the levels after step
    ``since``, at which the growth was noticed. The second test is independent of the suspicion, which was
    based on the levels up to that step. With fewer than `_LATER` levels, the second test is skipped.
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

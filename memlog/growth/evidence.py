"""Evidence that memory levels do not grow: since when they are steady, and what rise that excludes.

A series is *steady* if all of these hold:

- The newest levels lie near one value for at least a quarter of the series. Near means within four standard
  deviations of the levels, or within the floor (`Evidence.excluded`), whichever is larger.
- The line through these levels (`memlog.growth.lasting`) rises by less than the floor, and its interval
  excludes a rise that matters.
- The last few levels are not above the rest.
- The levels rise clearly more slowly than those before, also if all memory were used by now that memlog's own
  search has left free for the program.
- Earlier lasting rises have come to an end. If memory rose several times, such as at each evaluation, the
  time since the last rise must be longer than the times between the rises.

A series that is not steady *rises* if its lasting level is higher at the end than at the beginning. Otherwise
it only varies.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from statistics import median
from typing import NamedTuple

from memlog.growth.lasting import BLOCKS, line_through

FEWEST_LEVELS = 10
"""If there are fewer levels than this, nothing is known about growth."""
_SHORTEST = 16
"""Minimum number of steady levels; in a series with fewer levels, all of them."""
_QUARTER = 4
"""The newest levels must be steady for at least this part of the series: 4 means a quarter. A shorter time
can be a pause in the growth."""
_SIGMAS = 4
"""Number of standard deviations. Levels within this distance are near each other."""
_MAD = 1.4826
"""Standard deviation of a normal distribution, divided by the median of the distances from its median."""
_GROUPS = 32
"""Number of groups into which the levels are divided to find the first steady level."""
_MATTERS = 0.1
"""Share of the level. If a rise of this share can't be excluded, the levels vary too much to be steady."""
_LEAST = 4
"""Multiple of the floor. A smaller rise than this may always remain possible."""
_LAST = 3
"""Minimum number of last levels that are compared with the levels before them."""
_ALIKE = 1.6
"""Maximum ratio of two rises, and of the times before them, that belong to one pattern."""
_PATTERN = 3
"""Number of rises that are a pattern whatever their sizes are."""
_LONGER = 1.5
"""Factor. A pattern of rises has ended if the time since the last rise exceeds this factor times the longest
time between two of the rises."""


_SURE = 1.5
"""Ratio of the 99 % interval's width to that of the line's 95 % interval (Student's distribution with six
degrees of freedom)."""
_ENDED = 0.5
"""A rise has ended if the upper end of the later levels' rate is below this fraction of the rate before."""


_NEW_HIGH = 12
"""Divisor of the whole rise. A lasting level is a new high if it is above the last one by more than the
result."""


class Evidence(NamedTuple):
    """What is known about the growth of a series. Sizes are bytes."""

    since: int | None
    """Index since which the levels are steady; ``None`` if they are not."""
    steps: int
    """Number of steady levels; if they are not steady, number of all levels."""
    noise: float
    """Standard deviation of the steady levels around their line."""
    excluded: float
    """If a rise since ``since`` were larger than this, it would have been seen."""
    rise: float
    """Rise of the lasting level from the first levels to the last ones; 0 if it is not above the noise."""
    is_inside: bool = False
    """True if the levels are steady, and ``rise`` is that of what the program has allocated inside memory
    that it had freed before. ``steps`` is then the number of steps in which it rose."""


def evidence(
    indexes: Sequence[int], levels: Sequence[float], floor: float, hidden: float = 0.0
) -> Evidence:
    """Return what is known about the growth of a series with `FEWEST_LEVELS` levels or more.

    Args:
        indexes: Steps of the levels, ascending.
        levels: Memory levels in bytes.
        floor: Bytes. A smaller rise is no growth, because allocators take memory in pieces of this size.
        hidden: Bytes by which the program can have grown unseen, because memlog's search had left them free.
    """
    count = len(levels)
    least = min(max(_SHORTEST, count // _QUARTER), count)
    tail = levels[-least:]
    noise = _noise(tail)
    near = max(floor, _SIGMAS * noise)
    begin = _first_near(levels, count - least, median(tail), near)
    excluded = _excluded(indexes[begin:], levels[begin:], floor)
    # Early levels can belong to a warm-up that ends slowly, which makes the line rise. They are
    # left out as long as the rise has clearly slowed since.
    while excluded is None and begin < count - least:
        later = min((begin + count) // 2, count - least)
        if not _has_ended(indexes, levels, begin, later):
            break
        begin = later
        excluded = _excluded(indexes[begin:], levels[begin:], floor)
    steady = levels[begin:]
    lasting = _lasting(levels)
    if (
        excluded is None
        or _rises_at_the_end(steady, near)
        or _goes_on(levels, lasting, near)
        or not _has_slowed(indexes, levels, begin, near, hidden)
    ):
        rise = lasting[-1] - median(levels[: min(3, count)])
        return Evidence(None, count, noise, 0.0, rise if rise > near else 0.0)
    return Evidence(indexes[begin], len(steady), noise, excluded + hidden, 0.0)


def _noise(levels: Sequence[float]) -> float:
    """Return the standard deviation of levels around the line through their blocks."""
    places = range(len(levels))
    line = line_through(places, levels) if len(levels) >= BLOCKS else None
    distances = [
        level - (line.at(at) if line is not None else 0.0)
        for at, level in zip(places, levels, strict=True)
    ]
    middle = median(distances)
    return _MAD * median(abs(distance - middle) for distance in distances)


def _first_near(levels: Sequence[float], begin: int, value: float, near: float) -> int:
    """Return the index of the first level from which on all groups of levels lie near a value."""
    size, end = max(len(levels) // _GROUPS, 3), begin
    # Medians of groups ignore single spikes, which would end a search from level to level.
    while begin:
        first = max(begin - size, 0)
        if abs(median(levels[first:begin]) - value) > near:
            break
        begin = first
    # The change can lie within the oldest group that is near, or within the one before it.
    while begin < end and abs(levels[begin] - value) > near:
        begin += 1
    while begin and abs(levels[begin - 1] - value) <= near:
        begin -= 1
    return begin


def _excluded(indexes: Sequence[int], levels: Sequence[float], floor: float) -> float | None:
    """Return the largest rise that the levels do not exclude; ``None`` if they rise, or vary too much.

    A leak raises the lowest level of each block as well as the median. So it is enough if one of the two does
    not rise. The lowest levels vary less if garbage and temporary memory come and go.
    """
    edges = [len(levels) * block // BLOCKS for block in range(BLOCKS + 1)]
    places = [indexes[(a + b - 1) // 2] for a, b in pairwise(edges)]
    lowest = [min(levels[a:b]) for a, b in pairwise(edges)]
    bounds = [_bound(indexes, levels, floor), _bound(places, lowest, floor)]
    known = [bound for bound in bounds if bound is not None]
    most = max(_MATTERS * levels[-1], _LEAST * floor)
    likely, excluded = min(known, default=(most + 1, 0.0))
    return None if likely > most else excluded


def _has_ended(indexes: Sequence[int], levels: Sequence[float], begin: int, later: int) -> bool:
    """Return True if the levels from ``later`` on rise clearly more slowly than those from ``begin`` on."""
    before = line_through(indexes[begin:], levels[begin:])
    after = line_through(indexes[later:], levels[later:])
    return after.rate + after.error < _ENDED * before.rate


def _bound(
    indexes: Sequence[int], levels: Sequence[float], floor: float
) -> tuple[float, float] | None:
    """Return the upper ends of a rise's 95 % and 99 % intervals; ``None`` if the levels rise.

    Both are at least the floor.
    """
    line = line_through(indexes, levels)
    span = indexes[-1] - indexes[0]
    rise, error = line.rate * span, line.error * span
    if rise > floor / 2 and line.is_certain:
        return None
    return max(rise + error, floor), max(rise + _SURE * error, floor)


def _has_slowed(
    indexes: Sequence[int], levels: Sequence[float], begin: int, near: float, hidden: float
) -> bool:
    """Return True if the levels from ``begin`` on rise clearly more slowly than those before.

    What the search took is a part of the rise, and what it left free can hide growth since.
    """
    first, after = median(levels[: min(3, begin)] or levels[:1]), levels[begin:]
    rise, steps = median(after) - first, indexes[begin] - indexes[0]
    if rise <= near or not steps:
        return True
    line = line_through(indexes[begin:], after)
    span = indexes[-1] - indexes[begin]
    own = rise - hidden
    # Growth this fast could have gone unseen in the memory that the search left free.
    if own > near and hidden / span >= _ENDED * own / steps:
        return False
    # `rise` ends at a median, which lies in the middle of the later levels.
    return line.rate + line.error < _ENDED * rise / (steps + span / 2)


def _rises_at_the_end(levels: Sequence[float], near: float) -> bool:
    """Return True if the last levels are above the levels before them.

    Either several are above all but a few of those before, or one to three are far above all before.
    """
    if any(min(levels[-k:]) > max(levels[:-k]) + near for k in range(1, _LAST + 1)):
        return True
    last = max(_LAST, min(len(levels) // BLOCKS, 8))
    before = sorted(levels[:-last])
    # The highest tenth does not count: a few spikes must not hide a rise.
    usual = before[len(before) * 9 // 10]
    return min(levels[-_LAST:]) > usual + near / 2 and median(levels[-last:]) > usual + near / 4


def _lasting(levels: Sequence[float]) -> list[float]:
    """Return, for each index, the lowest of the levels from this index on."""
    lowest = levels[-1]
    minima = []
    # From the end, so that each level is compared only once.
    for level in reversed(levels):
        lowest = min(lowest, level)
        minima.append(lowest)
    return minima[::-1]


def longest_pause(indexes: Sequence[int], levels: Sequence[float]) -> int:
    """Return the longest time between two new highs of levels that rise, in units of the indexes.

    A level that is higher only for a while is no new high. The time before the first one counts, too.
    """
    lasting = _lasting(levels)
    by = (lasting[-1] - lasting[0]) / _NEW_HIGH
    highest, last, longest = lasting[0], indexes[0], 0
    for index, level in zip(indexes, lasting, strict=True):
        if level > highest + by:
            longest = max(longest, index - last)
            highest, last = level, index
    return longest


def _goes_on(levels: Sequence[float], lasting: Sequence[float], near: float) -> bool:
    """Return True if lasting rises form a pattern, such as a rise at each evaluation, that may go on.

    Rises in neighbouring groups of levels are one rise. A rise in the first groups is the warm-up. Towards
    the end, few levels are left that can dip, so that the lowest of them is higher. This is no rise: the
    median must rise, too.
    """
    size = max(len(lasting) // _GROUPS, 3)
    rises: list[tuple[int, float]] = []
    level, newest = lasting[0], 0
    for at in range(size, len(lasting), size):
        rise = lasting[at] - level
        usual = median(levels[at : at + size]) - median(
            levels[max(at - 2 * size, 0) : at - size + 1]
        )
        if rise > near and usual > near / 2:
            if at - newest <= 2 * size:
                rises[-1:] = [(at, rise + (rises[-1][1] if rises else 0.0))]
            else:
                rises.append((at, rise))
            level, newest = lasting[at], at
    if rises and rises[0][0] <= 2 * size:
        del rises[0]
    if len(rises) < 2:  # noqa: PLR2004 - one rise is no pattern
        return False
    places = [at for at, _ in rises]
    times = [after - before for before, after in pairwise(places)]
    rested = len(lasting) - 1 - places[-1]
    if len(rises) < _PATTERN:
        sizes = [risen for _, risen in rises]
        same = max(sizes) <= _ALIKE * min(sizes) and places[0] <= _ALIKE * times[0]
        return same and rested <= _LONGER * times[0]
    return rested <= _LONGER * max(times)

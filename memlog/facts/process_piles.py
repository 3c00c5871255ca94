"""Child processes of one kind that are started again and again, and do not end.

The memory of each process is steady, so only the sum over all of them grows. A process counts only while it
is alive. So the sum does not grow if a program replaces its pools or workers by new ones. Memory that forked
processes share does not count.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Sequence
from itertools import pairwise

from memlog.events import ChildReading
from memlog.growth import Growth
from memlog.growth.series import News, SeriesWatch

_FEWEST = 6
"""Minimum number of processes that were started during the growth and are still alive. If there are fewer,
memlog does not report the growth."""
_ENDED = 0.25
"""Maximum of ``ended / (ended + new)``. Above it, memlog does not report the growth, because processes of
this kind do end. ``ended`` is the number of processes that ended during the growth. ``new`` is the number of
processes that were started during the growth and are still alive."""
_PART = 0.5
"""Minimum of ``new / total``. Below it, memlog does not report the growth. ``new`` is the size of the living
processes that were started during the growth. ``total`` is the size of the growth."""
_TIMES = 4
"""Minimum number of times at which the processes of a short run were started, one time long after another."""
_GOES_ON = 1.5
"""The time since the newest start must not exceed this factor times the longest time between two starts. A
pool that starts its processes when they are first needed is full soon."""
_MULTIPLE = 2
"""More and more processes are started if there are more than this many times as many as at first. Two loaders
have twice as many workers as one."""
_SHORT = 4
"""Multiple of the least number of readings. With fewer, none may be enough to confirm the growth."""
_TWO = 2
"""Minimum number of times at which processes were started."""
_UNJUDGED = 2
"""Number of the newest readings that wait to be judged."""

ProcessKey = tuple[int, int]
"""Process id, and start of the process (Unix time in microseconds)."""
OnNews = Callable[[str, SeriesWatch, News, int], object]
"""Function that takes the kind of processes, the watch over their memory, the new verdict, and the number of
processes."""


def kind_of(role: str) -> str:
    """Return the kind of a process: its role without the number, such as ``DataLoader worker``."""
    return role.rstrip("0123456789 ")


class _Kind:
    def __init__(self, floor: float, least: int) -> None:
        self.watch = SeriesWatch(floor, least)
        self._floor, self._least = floor, least
        self.began: dict[ProcessKey, tuple[int, int]] = {}
        """For each living process, the first step at which it was seen, and its bytes at the newest step."""
        self.ends: list[int] = []
        """For each ended process, the first step at which it was missing."""
        self._newest: list[tuple[int, dict[ProcessKey, int]]] = []

    def take(self, step: int, alive: dict[ProcessKey, int]) -> News | None:
        """Store the bytes of each living process. Judge the third newest reading.

        A program ends its child processes after the program's last step. memlog can't know at once that a
        step was the last one. So the two newest readings are not judged.
        """
        if self._newest and self._newest[-1][0] == step:
            return None
        self._newest.append((step, alive))
        if len(self._newest) <= _UNJUDGED:
            return None
        step, alive = self._newest.pop(0)
        self.ends += [step for key in self.began if key not in alive]
        self.began = {
            key: (self.began[key][0] if key in self.began else step, size)
            for key, size in alive.items()
        }
        return self.watch.take(step, sum(alive.values()))

    def piled_up(self, growth: Growth) -> int:
        """Return the number of processes that make up a growth; 0 if the growth has another cause."""
        new = [size for since, size in self.began.values() if since > growth.since]
        ended = sum(growth.since < step for step in self.ends)
        if len(new) < _FEWEST or ended > _ENDED * (len(new) + ended):
            return 0
        return len(new) if sum(new) >= _PART * growth.total else 0

    def short_growth(self) -> Growth | None:
        """Return the growth of a run with too few readings to test it: none of its processes has ended."""
        starts, last, began = self._goes_on()
        if len(self.watch.finest.levels) >= _SHORT * self._least or len(starts) < _TIMES:
            return None
        self.began = began
        level = sum(size for _, size in began.values())
        total = level - sum(size for since, size in began.values() if since == starts[0])
        rate = total / (last - starts[0])
        # Too few readings for an interval of the rate.
        return (
            Growth(starts[0], rate, 0.0, 2 * rate, level, total) if total >= self._floor else None
        )

    def may_pile_up(self) -> int:
        """Return the number of processes if more and more were started until the end; otherwise 0."""
        starts, _, began = self._goes_on()
        first = sum(since == starts[0] for since, _ in began.values()) if starts else 0
        return len(began) if starts and len(began) > _MULTIPLE * first else 0

    def _goes_on(self) -> tuple[list[int], int, dict[ProcessKey, tuple[int, int]]]:
        """Return the steps at which the living processes began, the newest step, and `began` at this step.

        The result is empty if a process has ended, or no more are started.
        """
        began, last = dict(self.began), 0
        for step, alive in self._newest:
            if began.keys() - alive.keys():
                break  # the program ends them at its end
            began.update({key: (began.get(key, (step, 0))[0], size) for key, size in alive.items()})
            last = step
        starts = sorted({since for since, _ in began.values()})
        if self.ends or len(began) < _FEWEST or len(starts) < _TWO:
            return [], 0, {}
        if last - starts[-1] > _GOES_ON * max(b - a for a, b in pairwise(starts)):
            return [], 0, {}
        return starts, last, began


class ProcessPiles:
    """Watch over the kinds of child processes. ``on_news`` is called when growth is confirmed.

    ``floor`` and ``least`` have the same meanings as in `SeriesWatch`.
    """

    def __init__(self, floor: float, least: int, on_news: OnNews) -> None:
        self._kinds: defaultdict[str, _Kind] = defaultdict(lambda: _Kind(floor, least))
        self._on_news = on_news

    def take(self, step: int, children: Sequence[ChildReading]) -> None:
        sizes: dict[str, dict[ProcessKey, int]] = {kind: {} for kind in self._kinds}
        for child in children:
            key = child.pid, child.started
            if child.own is not None:
                sizes.setdefault(kind_of(child.role), {})[key] = child.own
        for kind, alive in sizes.items():
            self._report(kind, self._kinds[kind].take(step, alive))

    def finish(self) -> None:
        for kind, group in self._kinds.items():
            news = group.watch.end()
            grown = group.short_growth() if news is None else None
            self._report(kind, news if grown is None else News("confirmed", grown))

    def may_pile_up(self) -> tuple[str, int] | None:
        """Return a kind of processes of which more and more were started until the end, and their number."""
        counts = [(kind, group.may_pile_up()) for kind, group in self._kinds.items()]
        most = max(counts, key=lambda each: each[1], default=("", 0))
        return most if most[1] else None

    def _report(self, kind: str, news: News | None) -> None:
        if news is None or news.verdict != "confirmed":
            return
        group = self._kinds[kind]
        count = group.piled_up(news.growth)
        if count:
            self._on_news(kind, group.watch, news, count)

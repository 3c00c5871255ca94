"""Child processes of one kind that are started again and again, and do not end.

The memory of each process is steady, so only the sum over all of them grows. A process counts only while it
is alive. So the sum does not grow if a program replaces its pools or workers by new ones. Memory that forked
processes share does not count.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Sequence

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
            self._report(kind, group.watch.end())

    def _report(self, kind: str, news: News | None) -> None:
        if news is None or news.verdict != "confirmed":
            return
        group = self._kinds[kind]
        count = group.piled_up(news.growth)
        if count:
            self._on_news(kind, group.watch, news, count)

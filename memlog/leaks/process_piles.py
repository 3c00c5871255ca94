"""Child processes of one kind that are started again and again, and do not end.

Each of them is steady, so only their sum grows. Pools and workers that are replaced do not count: only
processes that are still alive do. Memory that forks share does not count.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Sequence

from memlog.events import ChildReading
from memlog.growth import Growth
from memlog.leaks.series import News, SeriesWatch

_FEWEST = 6
"""Fewest processes that were started while their memory grew, and are still alive."""
_ENDED = 0.25
"""Share of ended processes, among the new and the ended ones, above which processes of the kind do end."""
_PART = 0.5
"""Share of the growth that the new processes have to hold."""
_UNJUDGED = 2
"""Number of newest readings that are not judged."""

ProcessKey = tuple[int, int]
"""Process identifier and start of a process."""
OnNews = Callable[[str, SeriesWatch, News, int], object]
"""Takes the kind, the series of its memory, what changed, and the number of processes."""


def kind_of(role: str) -> str:
    """Return the kind of a process: its role without the number."""
    return role.rstrip("0123456789 ")


class _Kind:
    """Processes of one kind."""

    def __init__(self, floor: float, least: int) -> None:
        self.watch = SeriesWatch(floor, least)
        self.began: dict[ProcessKey, tuple[int, int]] = {}
        """First step at which each living process was seen, and its newest bytes."""
        self.ends: list[int] = []
        """Steps at which processes had ended."""
        self._newest: list[tuple[int, dict[ProcessKey, int]]] = []

    def take(self, step: int, alive: dict[ProcessKey, int]) -> News | None:
        """Take the bytes of the living processes, and judge an earlier reading.

        The newest readings are never judged: after the last step, a program ends its processes, and the
        reader may not know yet that it was the last.
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
        """Return how many processes make up a growth; 0 if it has another cause."""
        new = [size for since, size in self.began.values() if since > growth.since]
        ended = sum(growth.since < step for step in self.ends)
        if len(new) < _FEWEST or ended > _ENDED * (len(new) + ended):
            return 0
        return len(new) if sum(new) >= _PART * growth.total else 0


class ProcessPiles:
    """Watch over the kinds of child processes.

    Args:
        floor: As for `SeriesWatch`.
        least: As for `SeriesWatch`.
        on_news: Called with confirmed growth.
    """

    def __init__(self, floor: float, least: int, on_news: OnNews) -> None:
        self._kinds: defaultdict[str, _Kind] = defaultdict(lambda: _Kind(floor, least))
        self._on_news = on_news

    def take(self, step: int, children: Sequence[ChildReading]) -> None:
        """Take readings of all child processes."""
        sizes: dict[str, dict[ProcessKey, int]] = {kind: {} for kind in self._kinds}
        for child in children:
            key = child.pid, child.started
            if child.own is not None:
                sizes.setdefault(kind_of(child.role), {})[key] = child.own
        for kind, alive in sizes.items():
            self._told(kind, self._kinds[kind].take(step, alive))

    def finish(self) -> None:
        """Judge a last time."""
        for kind, group in self._kinds.items():
            self._told(kind, group.watch.end())

    def _told(self, kind: str, news: News | None) -> None:
        if news is None or news.verdict != "confirmed":
            return
        group = self._kinds[kind]
        count = group.piled_up(news.growth)
        if count:
            self._on_news(kind, group.watch, news, count)

"""Inquiry into memory that rises again and again, such as at each evaluation: its search and its findings.

`memlog.leaks.holder_search` watches what ten steps in a row keep. This inquiry stands beside it: it goes on
for many steps, and finds containers that grow every 1 to some hundred steps.
"""

from __future__ import annotations

import math
import sys
import threading
from collections.abc import Callable
from typing import TYPE_CHECKING, Final

from memlog._internal.diagnostics import Diagnostics
from memlog.events import ALLOCATED, HOST_ANON, SHARED, Batch
from memlog.leaks.holders import Holder, per_step

if TYPE_CHECKING:
    from memlog.leaks.growers import Grower
    from memlog.leaks.periodic_search import PeriodicSearch

_HOST_LEAST: Final = 2 * 1024**2
_DEVICE_LEAST: Final = 512 * 1024
"""Smallest rises of a device's memory, and `_HOST_LEAST` of the process's memory, that count."""
_PART: Final = 0.5
"""A rise counts if it is at least this part of the rises that led to the search."""
_STAIRS: Final = 3
"""Multiple of the smallest rise. If memory rises by this at once, it does so in stairs: a steady growth is
noticed as soon as it has reached the smallest rise that is a sign (`memlog.facts.repeated_rises`)."""
_TRIED: Final = 3
"""Number of rises after which another search need not wait any longer for this one."""
_TRIED_FIRST: Final = 5
"""As `_TRIED`, if no other search has looked for the cause."""
_PATIENCE: Final = 40, 150
"""Least and most steps for which another search waits, if no other search has looked for the cause."""
_MAX_SEARCHES: Final = 3
_SPARSE: Final = 12
"""Steps. If memory rises less often than this, a search that watches a few steps in a row finds nothing."""
LASTING: Final = 4
"""Number of rises of a search at which a container must grow before it is reported although the growth test
has not confirmed the growth, if memory rises rarely (`PeriodicInquiry.is_sparse`). Two rises have led to the
search. So a container that keeps five things is not named, nor a cache that fills within an epoch."""
_OFTEN: Final = 6
"""As `LASTING`, at the end of a run, if memory does not rise rarely."""
_QUIET: Final = 0.8
"""If memory has risen, at its rate, in less than this part of a search's steps, the growth began later."""
_OVERDUE: Final = 1.5
"""Multiple of the usual time from rise to rise. After this time, a rise has not come."""


class PeriodicInquiry:
    """One search at a time. ``on_news`` is called after a step that may have changed `holders`."""

    def __init__(self, diagnostics: Diagnostics, on_news: Callable[[int], object]) -> None:
        self._diagnostics = diagnostics
        self._on_news = on_news
        self._lock = threading.Lock()
        self._search: PeriodicSearch | None = None
        self._searches = 0
        self._is_paused = False
        self._steps = 0
        self.last_step = 0
        """Newest step of the search."""
        self._patience: float = 0
        self._tried = _TRIED
        """Number of rises, and of steps (`_patience`), for which another search waits for this one."""
        self.series = ""
        self._since = 0
        self._first: tuple[int, int] | None = None
        """First step of the search, and the level after it."""
        self.holders: tuple[Holder, ...] = ()
        """Holders that explain the rises of `series`, as after the newest rise."""
        self.newest: tuple[int, tuple[Holder, ...]] = 0, ()
        """Newest step at which containers held growth, if only a little, and these containers."""
        self.best: tuple[Holder, ...] = ()
        """Containers that held most of the growth of `series` at any rise, as far as Python sees."""
        self.rises = self.level = 0
        """Number of rises of the search at which the first holder grew, and bytes after the newest one."""
        self.rate = 0.0
        """Growth in bytes per step."""
        self._filled_in = math.inf
        """Steps in which the first holder would have gained all that it contains."""
        self._every = 0.0
        """Usual number of steps from one rise at which `holders` grow to the next; 0 if unknown."""
        self.is_sparse = False
        """True if `holders` grow at rises with many steps between them."""
        self.is_weighed = False
        """True if Python sees the bytes of `holders`. Otherwise they are named by elimination."""

    @property
    def searching(self) -> bool:
        return self._search is not None

    def begin(
        self, series: str, since: int, rise: float | None = None, rate: float | None = None
    ) -> None:
        """Begin a search, unless there is one. ``rise`` is the usual rise in bytes; ``None``: unknown.

        ``rate`` is the growth in bytes per step if no other search has looked for its cause. Another one then
        waits for a while.
        """
        if self._search is not None and rate is not None and series == self.series:
            self._be_patient(rate)
        if self._search is not None or self._searches >= _MAX_SEARCHES or self.holders:
            return
        if "torch" not in sys.modules:
            return
        from memlog.leaks.periodic_search import PeriodicSearch  # noqa: PLC0415 - it loads parts of torch

        self._searches += 1
        least = _DEVICE_LEAST if series.endswith(ALLOCATED) else _HOST_LEAST
        if series != self.series:
            self.best = ()
        self.series, self._since, self._first = series, since, None
        self._is_paused = False
        in_stairs = rise is not None and rise > _STAIRS * least
        self._steps, self._patience = 0, math.inf if in_stairs else 0
        self._tried = _TRIED
        self._search = PeriodicSearch(max(least, int(_PART * (rise or 0.0))))
        if rate is not None:
            self._be_patient(rate)

    def _be_patient(self, rate: float) -> None:
        """Let another search wait, unless rises come too slowly at ``rate`` bytes per step."""
        least = _DEVICE_LEAST if self.series.endswith(ALLOCATED) else _HOST_LEAST
        least_steps, most_steps = _PATIENCE
        needed = max(least_steps, _TRIED_FIRST * least / rate)
        if needed <= most_steps and self._patience < math.inf:
            self._tried = _TRIED_FIRST
            self._patience = max(self._patience, self._steps + needed)

    def after_step(self, step: int, event: Batch | None, *, paused: bool) -> None:
        """Continue the search. While other work takes memory (``paused``), the levels tell nothing."""
        search = self._search
        if search is None:
            return
        if paused:
            self._is_paused = True
            return
        # Several threads can train. A thread that does not get the lock at once goes on.
        if not self._lock.acquire(blocking=False):
            return
        try:
            self._go_on(search, step, event)
        except Exception as error:  # noqa: BLE001 - training goes on
            self._search = None
            self._diagnostics.fault("looking for what grows when memory rises", error)
        finally:
            self._lock.release()

    def stop(self) -> None:
        """End the search. `holders` stay."""
        self._search = None

    def _go_on(self, search: PeriodicSearch, step: int, event: Batch | None) -> None:
        self._steps += 1
        level = None if event is None or event.step != step else _level(event, self.series)
        if level is None:
            return
        self.last_step = step
        self._first = self._first or (step, level)
        if self._is_paused:
            self._is_paused = False
            search.restart()
        rises = len(search.rises)
        found = search.step_ended(step, level)
        if found is not None:
            self._take(found, level)
        if found is not None or (self.holders and len(search.rises) > rises):
            del found
            self._on_news(step)
        if search.has_ended:
            self._search = None

    @property
    def since(self) -> int:
        """Step since which memory grows at `rate`.

        The rise that led to the search can be another, long before: then the memory, or what the holder
        contains, is less than it would have gained since.
        """
        if self._first is None or self.rate <= 0:
            return self._since
        step, level = self._first
        lasted = (self.level - level) / self.rate
        if 0 < lasted < _QUIET * (self.last_step - step):
            return round(self.last_step - lasted)
        return max(self._since, min(step, round(self.last_step - self._filled_in)))

    @property
    def still_rises(self) -> bool:
        """True if rises went on until the newest step, so that the next one is not overdue.

        At the end of a run, one rise less than `LASTING` is enough if rises are rare, and `_OFTEN` rises
        otherwise, if the holder is sure.
        """
        search = self._search
        if search is None or not (search.rises and self.holders and self.is_weighed):
            return False
        if self.last_step - search.rises[-1][0] >= _OVERDUE * self._every:
            return False
        if self.is_sparse:
            return self.rises >= LASTING - 1
        return self.rises >= _OFTEN and all(one.confidence == "high" for one in self.holders)

    @property
    def is_promising(self) -> bool:
        """True if too few rises have come since the search began to name a holder, and more are expected."""
        search = self._search
        return (
            search is not None and self._steps < self._patience and len(search.rises) < self._tried
        )

    def _take(self, growers: list[Grower], level: int) -> None:
        from memlog.leaks.periodic_text import holder_of_growth  # noqa: PLC0415 - see above

        found = tuple(map(holder_of_growth, growers))
        if growers:
            self.newest = self.last_step, found
        is_cause = bool(growers) and not growers[0].is_little
        self.holders = found if is_cause else ()
        is_seen = is_cause and not any(one.is_by_elimination for one in growers)
        if is_seen and per_step(found) > per_step(self.best):
            self.best = found
        search = self._search
        self.level = level
        self._every = 0.0 if search is None else search.every
        if growers and growers[0].every:  # memory can rise for other reasons between
            self._every = growers[0].every
        is_stairs = search is not None and search.is_stairs
        self.is_sparse = is_cause and is_stairs and self._every >= _SPARSE
        self.is_weighed = not any(one.is_by_elimination for one in growers)
        self.rises = growers[0].readings if growers else 0
        self.rate = growers[0].growth / growers[0].steps if growers else 0.0
        self._filled_in = growers[0].filled_in if growers else math.inf


def _level(event: Batch, series: str) -> int | None:
    if series in (HOST_ANON, SHARED):
        return event.rss_anon if series == HOST_ANON else event.rss_shared
    device = next((one for one in event.devices if one.name + ALLOCATED == series), None)
    return None if device is None else device.allocated

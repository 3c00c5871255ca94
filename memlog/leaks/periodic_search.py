"""Inquiry into memory that rises again and again, such as at each evaluation or checkpoint.

Its search for containers that grow whenever memory rises, and its findings.

`memlog.leaks.holder_search` watches what ten steps in a row keep. This inquiry stands beside it: it goes on
for many steps, and finds containers that grow every 1 to some hundred steps.

1. Record the lengths of the program's own containers (`memlog.leaks.program_walk`). No object is kept.
2. Wait for a lasting rise of memory. Then walk again: each container that is longer becomes a candidate, and
   is kept as a path of names.
3. At each later rise, follow the paths and read the lengths. Drop a candidate that shrinks or stands still.
4. Weigh the newest elements of the candidates: do they explain the rises?

So neither the time between the rises nor their shape must be known, and steps between rises cost nothing.
"""

from __future__ import annotations

import math
import sys
import threading
import time
from collections import deque
from collections.abc import Callable
from statistics import median
from typing import TYPE_CHECKING, Final

from memlog._internal.diagnostics import Diagnostics
from memlog.events import ALLOCATED, HOST_ANON, SHARED, Batch
from memlog.leaks.growers import Candidate, Grower, RiseReading, growers_of, length_of, reading_of
from memlog.leaks.holders import Holder, per_step
from memlog.leaks.owner_chain import NamePath, follow
from memlog.leaks.program_walk import Lengths, ProgramWalk
from memlog.tracer.module_stack import CallingLines

if TYPE_CHECKING:
    from memlog.leaks.growers import Grower

_HOST_LEAST: Final = 2 * 1024**2
_DEVICE_LEAST: Final = 512 * 1024
"""Smallest rises of a device's memory, and `_HOST_LEAST` of the process's memory, that count."""
_PART: Final = 0.5
"""A rise counts if it is at least this part of the rises that led to the search."""
_HIGH_STAIRS: Final = 3
"""Multiple of the smallest rise. If memory rises by this at once, it does so in stairs: a steady growth is
noticed as soon as it has reached the smallest rise that is a sign (`memlog.facts.rises`)."""
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

        self._searches += 1
        least = _DEVICE_LEAST if series.endswith(ALLOCATED) else _HOST_LEAST
        if series != self.series:
            self.best = ()
        self.series, self._since, self._first = series, since, None
        self._is_paused = False
        in_stairs = rise is not None and rise > _HIGH_STAIRS * least
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
        growers = search.step_ended(step, level)
        if growers is not None:
            self._take(growers, level)
        if growers is not None or (self.holders and len(search.rises) > rises):
            # The growers keep objects of the program alive, and publishing does not need them.
            del growers
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
        # Rounded last, because `_filled_in` can be infinite.
        return round(max(self._since, min(step, self.last_step - self._filled_in)))

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
        return self.rises >= _OFTEN and all(holder.confidence == "high" for holder in self.holders)

    @property
    def is_promising(self) -> bool:
        """True if too few rises have come since the search began to name a holder, and more are expected."""
        search = self._search
        return (
            search is not None and self._steps < self._patience and len(search.rises) < self._tried
        )

    def _take(self, growers: list[Grower], level: int) -> None:
        from memlog.leaks.periodic_text import holder_of_growth  # noqa: PLC0415 - see above

        holders = tuple(map(holder_of_growth, growers))
        if growers:
            self.newest = self.last_step, holders
        is_cause = bool(growers) and not growers[0].is_little
        self.holders = holders if is_cause else ()
        is_seen = is_cause and not any(grower.is_by_elimination for grower in growers)
        if is_seen and per_step(holders) > per_step(self.best):
            self.best = holders
        search = self._search
        self.level = level
        self._every = 0.0 if search is None else search.every
        if growers and growers[0].every:  # memory can rise for other reasons between
            self._every = growers[0].every
        is_stairs = search is not None and search.is_stairs
        self.is_sparse = is_cause and is_stairs and self._every >= _SPARSE
        self.is_weighed = not any(grower.is_by_elimination for grower in growers)
        self.rises = growers[0].readings if growers else 0
        self.rate = growers[0].growth / growers[0].steps if growers else 0.0
        self._filled_in = growers[0].filled_in if growers else math.inf


def _level(event: Batch, series: str) -> int | None:
    if series in (HOST_ANON, SHARED):
        return event.rss_anon if series == HOST_ANON else event.rss_shared
    device = next(
        (candidate for candidate in event.devices if candidate.name + ALLOCATED == series), None
    )
    return None if device is None else device.allocated


_MAX_STEPS: Final = 1_500
"""Maximum number of steps of a search; twice as many while a container explains the growth."""
_MAX_WALKS: Final = 8
"""Maximum number of walks in a search: one before the rises, the others after rises without a candidate."""
_MORE: Final = 1.4
"""A walk after a rise begins only if the memory has risen in all by this factor since the one before. So
levels that go up and down, before a leak begins, do not use up the walks."""
_SHORTEST: Final = 2
_LONGEST: Final = 32
"""Least and most steps that a rise must last before it counts. If memory falls again after rises, memlog
doubles this number: in many programs the level at the ends of steps goes up and down by some MiB."""
_FALLS: Final = 2
"""Number of falls before that."""
_SETTLING: Final = 2
"""Number of steps after the first walk before the level counts: the walk takes memory, too."""
_STAIRS: Final = 1.5
"""Multiple of the smallest rise. A steady growth is noticed as soon as it has reached the smallest rise."""
_ONE_RISE: Final = 4
"""Rises within this number of steps are one."""
_STILL: Final = 5
"""A container that has not grown at this number of rises is dropped."""
_MAX_CANDIDATES: Final = 200
_SECONDS: Final = 0.5
"""Processor seconds that a search may take, beyond `_SHARE` of the training thread's time."""
_SHARE: Final = 0.03


class PeriodicSearch:
    """One search. Call `step_ended` after each step on the training thread.

    ``least`` is the smallest rise, in bytes, that counts.

    Attributes:
        rises: First step and size of each rise since the search began.
        has_ended: True if the search has ended.
        seconds: Processor time of the search so far.
    """

    def __init__(self, least: int) -> None:
        self._least = least
        self._newest: deque[int] = deque(maxlen=_SHORTEST)
        self._falls = 0
        self._began: int | None = None
        self._thread_began = time.thread_time()
        self._before: Lengths | None = None
        self._lines = CallingLines()
        self._walk: ProgramWalk | None = ProgramWalk(self._lines)
        self._walks = 1
        self._walks_at = 0.0
        """Level from which on the next walk may begin."""
        self._settles_at: int | None = None
        self._base = RiseReading(0, 0, 0, 0)
        self._level = 0
        self._candidates: list[Candidate] = []
        self._dropped: set[NamePath] = set()
        self._has_growers = False
        self._taken = self._weigh_at = 0
        """Number of rises so far, each part counted, and the number at which candidates are weighed again."""
        self._gradual: set[int] = set()
        """First steps of the rises that came in several steps."""
        self.rises: list[tuple[int, int]] = []
        self.has_ended = False
        self.seconds = 0.0

    def step_ended(self, step: int, level: int) -> list[Grower] | None:
        """Continue the search. Return the containers that explain the growth, the largest part first.

        The result is ``None`` if nothing has changed, and empty if no container explains the growth. If
        containers of tensors hold only a little of it (`Grower.is_little`), they are returned. The result
        refers to objects of the program: do not keep it.
        """
        if self.has_ended:
            return None
        began = time.thread_time()
        try:
            return self._go_on(step, level)
        finally:
            self.seconds += time.thread_time() - began

    @property
    def is_stairs(self) -> bool:
        """True if memory rises at once, and stays as it is between the rises."""
        sizes = [size for _, size in self.rises]
        at_once = 2 * len(self._gradual) < len(sizes)
        return bool(sizes) and at_once and median(sizes) > _STAIRS * self._least

    @property
    def every(self) -> float:
        """Mean number of steps from rise to rise; 0 if there are not two."""
        count = len(self.rises) - 1
        return (self.rises[-1][0] - self.rises[0][0]) / count if count > 0 else 0.0

    def restart(self) -> None:
        """Begin again: other work has taken memory meanwhile, so that the levels so far do not count."""
        self._walk, self._before = ProgramWalk(self._lines), None
        self._newest.clear()
        self._forget_rises()

    def _forget_rises(self) -> None:
        self._candidates = []
        self._walks, self._walks_at = 1, 0.0
        self.rises.clear()
        self._gradual.clear()

    def _go_on(self, step: int, level: int) -> list[Grower] | None:
        if self._began is None:
            self._began = step
        most = 2 * _MAX_STEPS if self._has_growers else _MAX_STEPS
        if step - self._began > most or step < self._began:
            self.has_ended = True
            return None
        self._newest.append(level)
        if self._walk is not None:
            if not self._may_work() or not self._walk.go_on():
                return None
            return self._end_walk(self._walk, step)
        # Memory has risen only if all of the newest levels are higher, and fallen only if all are lower.
        low, high = min(self._newest), max(self._newest)
        if self._settles_at is not None:
            if step >= self._settles_at:
                self._settles_at, self._level = None, low
                self._base = RiseReading(step, step, 0, low)
            return None
        if low >= self._level + self._least:
            return self._take_rise(step, low)
        if high < self._level - self._least:
            self._level = high
            self._falls += 1
            if self._falls >= _FALLS and not self._has_growers and len(self._newest) < _LONGEST:
                self._look_longer()
        return None

    def _look_longer(self) -> None:
        """Let a rise count only if it lasts twice as long, and forget the rises so far."""
        self._newest = deque(self._newest, maxlen=2 * len(self._newest))
        self._falls = 0
        self._dropped.clear()
        self._forget_rises()

    def _may_work(self) -> bool:
        return self.seconds < _SECONDS + _SHARE * (time.thread_time() - self._thread_began)

    def _end_walk(self, walk: ProgramWalk, step: int) -> list[Grower] | None:
        self._walk = None
        if self._before is None:
            self._before = walk.lengths
            self._settles_at = step + _SETTLING
            return None
        known = {candidate.path for candidate in self._candidates} | self._dropped
        for grown in walk.grown[:_MAX_CANDIDATES]:
            if grown.path not in known and len(self._candidates) < _MAX_CANDIDATES:
                # The first walk recorded `before` at the level of `_base`.
                first = self._base._replace(length=grown.before)
                # The walk can have taken many steps: length, level and step are of one moment.
                chain = follow(grown.path)
                length = grown.now if chain is None else length_of(chain.objects[-1])
                level = max(self._level, min(self._newest))
                now = reading_of(chain, self.rises[-1][0], step, length, level)
                self._candidates.append(Candidate(grown.path, [first, now], grown.is_replaced))
        return self._growers() if self._candidates else None

    def _take_rise(self, step: int, low: int) -> list[Grower] | None:
        size = low - self._level
        if self.rises and step - self.rises[-1][0] <= _ONE_RISE:
            begun, before = self.rises.pop()
            self.rises.append((begun, before + size))
            self._gradual.add(begun)
            for candidate in self._candidates:
                # `_still_grows` adds a later reading of the same rise.
                candidate.readings.pop()
        else:
            self.rises.append((step, size))
        self._level = low
        growing = [
            candidate for candidate in self._candidates if self._still_grows(candidate, step)
        ]
        dropped = {candidate.path for candidate in self._candidates} - {
            candidate.path for candidate in growing
        }
        self._dropped |= dropped
        self._candidates = growing
        self._taken += 1
        if self._has_growers and not dropped and self._taken < self._weigh_at:
            return None
        # A holder that was named several times is weighed less and less often.
        self._weigh_at = self._taken + max(1, self._taken // 3)
        growers = self._growers()
        is_time = self._walks < _MAX_WALKS and self._level >= self._walks_at
        if not self._has_growers and is_time and self._may_work():
            self._walk = ProgramWalk(self._lines, self._before)
            self._walks += 1
            self._walks_at = self._base.level + _MORE * (self._level - self._base.level)
        return growers

    def _still_grows(self, one: Candidate, step: int) -> bool:
        chain = follow(one.path)
        length = -1 if chain is None else length_of(chain.objects[-1])
        before = [reading.length for reading in one.readings]
        if length < before[-1]:
            return False
        one.readings.append(reading_of(chain, self.rises[-1][0], step, length, self._level))
        return len(before) < _STILL or length > before[-_STILL]

    def _growers(self) -> list[Grower]:
        growers = growers_of(self._candidates, in_stairs=self.is_stairs)
        self._has_growers = bool(growers) and not growers[0].is_little
        return growers

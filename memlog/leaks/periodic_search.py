"""Search for containers that grow whenever memory rises, such as at each evaluation or checkpoint.

1. Record the lengths of the program's own containers (`memlog.leaks.program_walk`). No object is kept.
2. Wait for a lasting rise of memory. Then walk again: each container that is longer becomes a candidate, and
   is kept as a path of names.
3. At each later rise, follow the paths and read the lengths. Drop a candidate that shrinks or stands still.
4. Weigh the newest elements of the candidates: do they explain the rises?

So neither the time between the rises nor their shape must be known, and steps between rises cost nothing.
"""

from __future__ import annotations

import time
from collections import deque
from statistics import median
from typing import Final

from memlog.leaks.growers import Candidate, Grower, RiseReading, growers_of, length_of, reading_of
from memlog.leaks.program_walk import Lengths, ProgramWalk
from memlog.leaks.variable_paths import Path, follow
from memlog.tracer.attribution.calling_lines import CallingLines

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
        self._dropped: set[Path] = set()
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
        known = {one.path for one in self._candidates} | self._dropped
        for one in walk.grown[:_MAX_CANDIDATES]:
            if one.path not in known and len(self._candidates) < _MAX_CANDIDATES:
                first = self._base._replace(length=one.before)
                # The walk can have taken many steps: length, level and step are of one moment.
                chain = follow(one.path)
                length = one.now if chain is None else length_of(chain.objects[-1])
                level = max(self._level, min(self._newest))
                now = reading_of(chain, self.rises[-1][0], step, length, level)
                self._candidates.append(Candidate(one.path, [first, now], one.is_replaced))
        return self._growers() if self._candidates else None

    def _take_rise(self, step: int, low: int) -> list[Grower] | None:
        size = low - self._level
        if self.rises and step - self.rises[-1][0] <= _ONE_RISE:
            begun, before = self.rises.pop()
            self.rises.append((begun, before + size))
            self._gradual.add(begun)
            for one in self._candidates:
                one.readings.pop()
        else:
            self.rises.append((step, size))
        self._level = low
        growing = [one for one in self._candidates if self._still_grows(one, step)]
        dropped = {one.path for one in self._candidates} - {one.path for one in growing}
        self._dropped |= dropped
        self._candidates = growing
        self._taken += 1
        if self._has_growers and not dropped and self._taken < self._weigh_at:
            return None
        # A holder that was named several times is weighed less and less often.
        self._weigh_at = self._taken + max(1, self._taken // 3)
        found = self._growers()
        is_time = self._walks < _MAX_WALKS and self._level >= self._walks_at
        if not self._has_growers and is_time and self._may_work():
            self._walk = ProgramWalk(self._lines, self._before)
            self._walks += 1
            self._walks_at = self._base.level + _MORE * (self._level - self._base.level)
        return found

    def _still_grows(self, one: Candidate, step: int) -> bool:
        chain = follow(one.path)
        length = -1 if chain is None else length_of(chain.objects[-1])
        before = [reading.length for reading in one.readings]
        if length < before[-1]:
            return False
        one.readings.append(reading_of(chain, self.rises[-1][0], step, length, self._level))
        return len(before) < _STILL or length > before[-_STILL]

    def _growers(self) -> list[Grower]:
        found = growers_of(self._candidates, in_stairs=self.is_stairs)
        self._has_growers = bool(found) and not found[0].is_little
        return found

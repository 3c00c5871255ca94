"""Windows of memory levels at several scales, in bounded memory."""

from __future__ import annotations

from collections import deque
from itertools import islice

MAX_LEVELS = 128
"""Maximum number of levels in a window. In a full window, a new level replaces the oldest."""
_SCALES = 3
"""Default number of windows of a series. The first window covers 128 readings. Each later window covers four
times as many readings as the window before it."""
JOINED = 4
"""Number of levels that are joined to one level of the next, longer window. The lowest level is used."""


class LevelWindow:
    """The newest levels of a series at one scale.

    At the finest scale, a level is one reading. At each coarser scale, a level is the lowest of `JOINED`
    levels of the next finer scale.

    Attributes:
        indexes: Steps or epochs of the levels.
        levels: The levels, the oldest first.
        unseen: Number of levels that were added since the window was last judged. The caller that judges the
            window sets it to 0.
    """

    def __init__(self) -> None:
        self.indexes: deque[int] = deque(maxlen=MAX_LEVELS)
        self.levels: deque[float] = deque(maxlen=MAX_LEVELS)
        self.clear()

    def clear(self) -> None:
        self.indexes.clear()
        self.levels.clear()
        self._added = 0
        self.unseen = MAX_LEVELS

    def add(self, index: int, level: float) -> None:
        self.indexes.append(index)
        self.levels.append(level)
        self._added += 1
        self.unseen += 1

    def lower(self, level: float) -> None:
        """Add a second reading at the newest index. Keep the lower of the two readings."""
        if self.levels:
            self.levels[-1] = min(self.levels[-1], level)

    def joined(self) -> float | None:
        """Return the level to add to the next, longer window: the lowest of the newest `JOINED` levels.

        Return ``None`` if the newest level does not complete a group of `JOINED` levels.
        """
        if not self._added or self._added % JOINED:
            return None
        return min(islice(reversed(self.levels), JOINED))


class LevelScales:
    """Windows of one series at several scales, the finest first."""

    def __init__(self, count: int = _SCALES) -> None:
        self.windows = tuple(LevelWindow() for _ in range(count))
        self.finest = self.windows[0]

    def clear(self) -> None:
        for window in self.windows:
            window.clear()

    def add(self, index: int, level: float) -> list[LevelWindow]:
        """Add the next level. Return the windows that got a new level."""
        added = []
        for window in self.windows:
            window.add(index, level)
            added.append(window)
            joined = window.joined()
            if joined is None:
                break
            level = joined
        return added

    def covering(self, since: int | None, least: int) -> LevelWindow | None:
        """Return the finest window that still has all levels from the index ``since`` on.

        If ``since`` is ``None``, return the finest window of all. Return ``None`` if no window reaches back
        to ``since``, or if the window to return has fewer than ``least`` levels.
        """
        for window in self.windows:
            if len(window.levels) < least:
                return None
            if since is None or len(window.levels) < MAX_LEVELS or window.indexes[0] <= since:
                return window
        return None

    def highest_before(self, index: int) -> float | None:
        """Return the highest level before an index; ``None`` if there is none. Ignore the finest window."""
        return max(
            (
                level
                for window in self.windows[1:]
                for at, level in zip(window.indexes, window.levels, strict=True)
                if at < index
            ),
            default=None,
        )

"""Windows of memory levels at several scales, in bounded memory."""

from __future__ import annotations

from collections import deque
from itertools import islice

MOST = 128
"""Most levels in a window."""
_SCALES = 3
"""Windows of a series, each four times as long as the one before: the last covers 2,048 levels."""
JOINED = 4
"""Levels of a window that become one level of the next, longer window: their lowest."""


class LevelWindow:
    """The newest levels at one scale.

    Attributes:
        indexes: Steps or epochs of the levels.
        levels: The levels, the oldest first.
        unseen: Number of levels that were added since the window was judged.
    """

    __slots__ = ("_added", "indexes", "levels", "unseen")

    def __init__(self) -> None:
        self.indexes: deque[int] = deque(maxlen=MOST)
        self.levels: deque[float] = deque(maxlen=MOST)
        self.clear()

    def clear(self) -> None:
        """Remove all levels."""
        self.indexes.clear()
        self.levels.clear()
        self._added = 0
        self.unseen = MOST

    def add(self, index: int, level: float) -> None:
        """Add the next level."""
        self.indexes.append(index)
        self.levels.append(level)
        self._added += 1
        self.unseen += 1

    def lower(self, level: float) -> None:
        """Add another reading of the newest level: the lower one counts."""
        if self.levels:
            self.levels[-1] = min(self.levels[-1], level)

    def joined(self) -> float | None:
        """Return a level for the next window if the newest level completes one, otherwise ``None``."""
        if not self._added or self._added % JOINED:
            return None
        return min(islice(reversed(self.levels), JOINED))


class LevelScales:
    """Windows of one series at several scales, the finest first."""

    __slots__ = ("windows",)

    def __init__(self) -> None:
        self.windows = tuple(LevelWindow() for _ in range(_SCALES))

    @property
    def finest(self) -> LevelWindow:
        """The window that holds each level."""
        return self.windows[0]

    def clear(self) -> None:
        """Remove all levels."""
        for window in self.windows:
            window.clear()

    def add(self, index: int, level: float) -> list[LevelWindow]:
        """Add the next level; return the windows that got one."""
        added = []
        joined: float | None = level
        for window in self.windows:
            if joined is None:
                break
            window.add(index, joined)
            added.append(window)
            joined = window.joined()
        return added

    def covering(self, since: int | None, least: int) -> LevelWindow | None:
        """Return the finest window that reaches back to an index, or that holds all levels.

        Args:
            since: The index; ``None``: return the finest of all windows.
            least: Fewest levels that the window must have.

        Returns:
            The window; ``None`` if it has too few levels, or if no window reaches back so far.
        """
        for window in self.windows:
            if len(window.levels) < least:
                return None
            if since is None or len(window.levels) < MOST or window.indexes[0] <= since:
                return window
        return None

    def highest_before(self, index: int) -> float | None:
        """Return the highest level before an index, in the longer windows; ``None`` if there is none."""
        return max(
            (
                level
                for window in self.windows[1:]
                for at, level in zip(window.indexes, window.levels, strict=True)
                if at < index
            ),
            default=None,
        )

"""Windows of memory levels at several scales, in bounded memory."""

from __future__ import annotations

from collections import deque
from itertools import islice

MOST = 128
"""Most levels in a window."""
JOINED = 4
"""Levels of a window that become one level of the next, longer window: their lowest."""


class LevelWindow:
    """The newest levels at one scale.

    Attributes:
        indexes: Steps or epochs of the levels.
        levels: The levels, the oldest first.
        unseen: Levels added since the window was judged.
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
        """Add another reading of the newest level: the lowest counts."""
        if self.levels:
            self.levels[-1] = min(self.levels[-1], level)

    def joined(self) -> float | None:
        """Return a level for the next window if the newest level completes one, otherwise ``None``."""
        if not self._added or self._added % JOINED:
            return None
        return min(islice(reversed(self.levels), JOINED))

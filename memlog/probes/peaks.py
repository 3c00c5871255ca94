"""Peaks of a window, from a high-water mark that other code may reset.

An allocator has one mark for the whole process. Resetting the mark for each window would destroy its value
for all other code, so memlog only reads the mark. Between two readings the mark rose, stayed equal or fell.
`PeakWindow.advance` derives the window's peak in each of these three cases.
"""

from __future__ import annotations

from memlog.events import PeakSource


class PeakWindow:
    """Peak of each window. A window is the time between two readings of one mark."""

    def __init__(self) -> None:
        self._current: int | None = None
        self._mark: int | None = None

    def advance(
        self, current: int | None, mark: int | None
    ) -> tuple[int | None, PeakSource | None]:
        """End a window with this reading in bytes, and begin the next window.

        Returns:
            The window's peak in bytes and its source; ``(None, None)`` if ``mark`` is ``None``.

            * ``exact``: the mark rose, so the mark is the window's peak.
            * ``watermark``: the mark stayed equal, or this is the first reading. The mark is an upper bound.
            * ``sampled``: the mark fell, because other code reset the mark. The peak before the reset is
              lost. The highest known value of this window is a lower bound.

            memlog can't detect a reset if the mark rises to its old value before the next reading. The
            result is then valid only for the time since the reset.
        """
        if mark is None:
            return None, None
        # The caller can read the two numbers at different moments, so `current` can be above `mark`.
        if current is not None and current > mark:
            mark = current
        opening, before = self._current, self._mark
        self._current, self._mark = current, mark
        if before is None or mark == before:
            return mark, "watermark"
        if mark > before:
            return mark, "exact"
        return max(mark, opening or 0), "sampled"

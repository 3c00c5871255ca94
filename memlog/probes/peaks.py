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
        """End a window at this reading, which is in bytes, and begin the next.

        Returns:
            The window's peak in bytes and how it was obtained; ``(None, None)`` if ``mark`` is ``None``.

            * The mark rose: the peak lies in this window, ``exact``.
            * The mark stayed equal, or this is the first reading: an upper bound, ``watermark``.
            * The mark fell, so other code reset it: the peak before the reset is lost, and the highest known
              value of this window is a lower bound, ``sampled``.

            If the mark was reset and rose to its old value or higher within one window, the reset can't be
            detected. The result is then valid for the time since the reset.
        """
        if mark is None:
            return None, None
        # The caller can read the two numbers at different moments, so `current` can be above `mark`.
        mark = max(mark, current or 0)
        opening, before = self._current, self._mark
        self._current, self._mark = current, mark
        if before is None or mark == before:
            return mark, "watermark"
        if mark > before:
            return mark, "exact"
        return max(mark, opening or 0), "sampled"

"""Peaks of a window, from a high-water mark that belongs to somebody else.

An allocator keeps one mark for the whole process. Whoever resets it to get the peak of a window
destroys everybody else's, so memlog only ever looks: between two looks the mark rose, stood still
or fell, and each of the three says something about the peak of the time between them.
"""

from __future__ import annotations

from memlog.events import PeakSource


class PeakWindow:
    """Tells the peak of each window, which is the time between two readings of one mark."""

    def __init__(self) -> None:
        self._current: int | None = None
        self._mark: int | None = None

    def advance(
        self, current: int | None, mark: int | None
    ) -> tuple[int | None, PeakSource | None]:
        """Ends a window at this reading and begins the next.

        Args:
            current: Bytes in use now.
            mark: Bytes of the high-water mark now.

        Returns:
            The window's peak in bytes and how it was obtained; ``(None, None)`` without a mark.

            * The mark rose: the peak lies in this window, ``exact``.
            * It stood still, or this is the first reading: an upper bound, ``watermark``.
            * It fell, so somebody reset it: what was before the reset is lost, and the highest
              value known of this window is a lower bound, ``sampled``.

            A reset that is followed, in the same window, by a rise back to the old mark or past it
            leaves no trace; then these words hold for the time since the reset.
        """
        if mark is None:
            return None, None
        # The two numbers may come from different places, a moment apart.
        mark = max(mark, current or 0)
        opening, before = self._current, self._mark
        self._current, self._mark = current, mark
        if before is None or mark == before:
            return mark, "watermark"
        if mark > before:
            return mark, "exact"
        return max(mark, opening or 0), "sampled"

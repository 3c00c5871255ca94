"""Log of limited size to which an engine appends its events. Finalizers of storages also append to it."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Collection

from memlog.trace import encoding
from memlog.trace.accounting import Accountant

_OF_STORAGES = (*(encoding.ALLOC, encoding.FREE, encoding.CLASSIFY, encoding.USES, encoding.LINE),)
_FOLD_AT_ONCE = 8192
"""Number of events that the log adds to the totals at once, after the log has kept ``max_events`` events."""


class EventLog:
    """Log that keeps the first events individually, and folds all events into totals.

    Folding adds events to the totals. The log then deletes the events that it does not keep.

    Args:
        max_events: Maximum number of events to keep individually.
        most_events: Number of folded events at which the log overflows; ``None``: no limit.
        most_seconds: Seconds of memlog's own code after which recording stops; ``None``: no limit.

    Attributes:
        append: Function that appends packed events in one atomic call, from any thread.
        events: Number of events that have been folded.
        overflowed: True as soon as ``most_events`` events have been folded.
        seconds: Seconds that memlog's own code has taken in the window.
        cut: True as soon as ``seconds`` has reached ``most_seconds``.
        on_overflow: Function without arguments that stops recording. It is called once if the log is cut, and
            at each fold while ``overflowed`` is true.
        elsewhere: Highest number of bytes of the storages that `leave_out` has removed.
        began_us: Start of the log, in microseconds since the epoch.
    """

    def __init__(
        self,
        max_events: int,
        accountant: Accountant,
        most_events: int | None = None,
        most_seconds: float | None = None,
    ) -> None:
        self.accountant = accountant
        self._most_events = most_events
        self._most_seconds = float("inf") if most_seconds is None else most_seconds
        self.seconds = 0.0
        self.cut = False
        self.events = 0
        self._max_kept = max_events
        self._kept: list[bytes] = []
        self._kept_events = 0
        self._appended = bytearray()
        self._limit = max_events * encoding.EVENT_BYTES
        self._folding = threading.Lock()
        self.begin()
        self.overflowed = False
        self.on_overflow: Callable[[], object] = int
        self.append = self._appended.extend
        self.elsewhere = 0

    def begin(self) -> None:
        """Set the start of the log to now. Times of events count from this start."""
        self.began_us = time.time_ns() // 1000
        self._began_ns = time.perf_counter_ns()

    def now(self) -> int:
        """Return nanoseconds since the log began."""
        return time.perf_counter_ns() - self._began_ns

    def took(self, seconds: float) -> None:
        """Record that memlog's own code has taken ``seconds`` of the traced program's time."""
        self.seconds += seconds
        if self.seconds >= self._most_seconds and not self.cut:
            self.cut = True
            self.on_overflow()

    def fold_when_full(self) -> None:
        """Call `fold` if enough events have been appended. Finalizers must not call this."""
        if len(self._appended) >= self._limit:
            self.fold()

    def fold(self) -> None:
        """Fold the appended events into the totals. Do nothing if another thread is folding."""
        if not self._folding.acquire(blocking=False):
            return
        try:
            # Copying and deleting are each atomic. Events that finalizers append in between stay.
            piece = bytes(self._appended)
            del self._appended[: len(piece)]
            self.accountant.fold(piece)
            self._keep(piece)
            if self._kept_events >= self._max_kept:
                self._limit = _FOLD_AT_ONCE * encoding.EVENT_BYTES
        finally:
            self._folding.release()
        if self._most_events is not None and self.events >= self._most_events:
            self.overflowed = True
            self.on_overflow()

    def leave_out(self, keys: Collection[int]) -> None:
        """Remove the events of storages, given by their keys, from the events that are not folded yet."""
        kept, live, level = bytearray(), dict[int, int](), 0
        for event in encoding.decode(bytes(self._appended)):
            if event.kind not in _OF_STORAGES or event.key not in keys:
                kept += encoding.pack(*event)
            elif event.kind == encoding.ALLOC:
                live[event.key] = event.size
                level += event.size
                self.elsewhere = max(self.elsewhere, level)
            elif event.kind == encoding.FREE:
                level -= live.pop(event.key, 0)
        self._appended[:] = kept

    def close(self) -> tuple[bytes, int]:
        """Add the remaining events to the totals, and finish the totals.

        Returns:
            The kept events, and their number.
        """
        self.fold()
        self.accountant.finish()
        return b"".join(self._kept), self._kept_events

    def _keep(self, piece: bytes) -> None:
        count = len(piece) // encoding.EVENT_BYTES
        self.events += count
        fits = min(count, self._max_kept - self._kept_events)
        if fits > 0:
            self._kept.append(piece[: fits * encoding.EVENT_BYTES])
            self._kept_events += fits

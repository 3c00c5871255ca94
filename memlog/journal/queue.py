"""Write to a slow file system from a background thread, so that the trainer's thread does not wait."""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable
from typing import Any

from memlog._internal.diagnostics import Diagnostics

MAX_WAITING = 100_000
"""Maximum number of queued writes, about 15 MB of batch events. Further writes are dropped."""
CLOSE_TIMEOUT = 5.0
"""Maximum seconds that `WriteQueue.close` waits for queued writes."""


class WriteQueue:
    """Queue of writes. The queue's own thread runs them in order."""

    def __init__(self, diagnostics: Diagnostics) -> None:
        self._diagnostics = diagnostics
        self._waiting: queue.SimpleQueue[Callable[[], Any] | None] = queue.SimpleQueue()
        self._put = self._done = 0
        self._thread = threading.Thread(target=self._run, name="memlog-journal", daemon=True)
        self._thread.start()

    def put(self, write: Callable[[], Any]) -> None:
        """Queue a write and return at once. If the queue is full, drop the write and count it."""
        if self._waiting.qsize() < MAX_WAITING:
            self.put_always(write)
            return
        self._diagnostics.drop(
            "journal_queue_full",
            "the disk is so slow that the journal's queue is full; training goes on, and memlog counts the "
            "events that are lost (set MEMLOG_DIR to a local disk)",
        )

    def put_always(self, operation: Callable[[], Any]) -> None:
        """Queue an operation that must not be dropped, such as beginning a new segment."""
        self._put += 1
        self._waiting.put(operation)

    @property
    def is_idle(self) -> bool:
        """True if every queued operation is done. If so, the caller may run the next operation itself."""
        return self._done == self._put

    def end(self) -> None:
        """Tell the thread to end after the last queued operation; do not wait for the thread."""
        self._waiting.put(None)

    def close(self) -> bool:
        """End the thread and wait at most `CLOSE_TIMEOUT` seconds; return True if everything was written."""
        self.end()
        self._thread.join(CLOSE_TIMEOUT)
        return not self._thread.is_alive()

    def waiting(self) -> int:
        return self._waiting.qsize()

    def _run(self) -> None:
        while (operation := self._waiting.get()) is not None:
            with self._diagnostics.contained("writing the journal"):
                operation()
            self._done += 1

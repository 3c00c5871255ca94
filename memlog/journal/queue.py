"""Writing behind a slow file system: the trainer's thread no longer waits for the disk."""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable
from typing import Any

from memlog._internal.diagnostics import Diagnostics

MAX_WAITING = 100_000
"""About 15 MB of batch events."""
CLOSE_TIMEOUT = 5.0
"""Seconds that closing waits for the rest to be written."""


class WriteQueue:
    """Performs writes in order, on a thread of its own.

    Args:
        diagnostics: Where writes that found the queue full are counted.
    """

    def __init__(self, diagnostics: Diagnostics) -> None:
        self._diagnostics = diagnostics
        self._waiting: queue.SimpleQueue[Callable[[], Any] | None] = queue.SimpleQueue()
        self._put = self._done = 0
        self._thread = threading.Thread(target=self._run, name="memlog-journal", daemon=True)
        self._thread.start()

    def put(self, write: Callable[[], Any]) -> None:
        """Queues a write that may be dropped, and counted, where the queue is full. Returns at once."""
        if self._waiting.qsize() < MAX_WAITING:
            self.put_always(write)
            return
        self._diagnostics.drop(
            "journal_queue_full",
            "the disk is so slow that the journal's queue is full; training goes on, and what is lost "
            "is counted (set MEMLOG_DIR to a local disk)",
        )

    def put_always(self, operation: Callable[[], Any]) -> None:
        """Queues an operation that must not be dropped, such as beginning a new segment."""
        self._put += 1
        self._waiting.put(operation)

    @property
    def is_idle(self) -> bool:
        """Whether all is done that was put: whoever puts may then do the next operation himself."""
        return self._done == self._put

    def end(self) -> None:
        """Ends the thread once all is done, without waiting for that."""
        self._waiting.put(None)

    def close(self) -> bool:
        """Waits, at most `CLOSE_TIMEOUT` seconds, for what is queued; says whether all was written."""
        self.end()
        self._thread.join(CLOSE_TIMEOUT)
        return not self._thread.is_alive()

    def waiting(self) -> int:
        """Number of operations that are still to be done."""
        return self._waiting.qsize()

    def _run(self) -> None:
        while (operation := self._waiting.get()) is not None:
            with self._diagnostics.contained("writing the journal"):
                operation()
            self._done += 1

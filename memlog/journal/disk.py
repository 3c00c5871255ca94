"""Writing to a disk, detection that it is slow, and a queue that the trainer's thread then writes to."""

from __future__ import annotations

import ctypes
import os
import queue
import threading
import time
from collections.abc import Callable
from typing import Any

from memlog._internal.diagnostics import Diagnostics

SLOW_WRITE_NS = 1_000_000
"""Nanoseconds above which a write counts as slow."""
SLOW_WRITES = 20
"""If at least this number of writes are slow among `WINDOW` consecutive writes, the disk counts as slow."""
WINDOW = 200

_write = ctypes.PyDLL(None).write
_write.argtypes = (ctypes.c_int, ctypes.c_char_p, ctypes.c_size_t)
_write.restype = ctypes.c_ssize_t


class Disk:
    """Writer that measures whether the disk is slow.

    ``os.write`` releases the GIL. If another thread computes meanwhile, getting the GIL back takes 5 ms or
    more. So a slow write counts only if the write kept the GIL. In each group of `WINDOW` writes, all writes
    after the first slow write keep the GIL.
    """

    def __init__(self) -> None:
        self._writes = self._slow = 0
        self._suspected = False

    def write(self, fd: int, data: bytes) -> int:
        """Call ``write(2)`` and return the number of bytes written.

        Raises:
            OSError: Nothing was written.
        """
        begun = time.perf_counter_ns()
        written = write_keeping_the_gil(fd, data) if self._suspected else os.write(fd, data)
        self._took(time.perf_counter_ns() - begun)
        return written

    @property
    def is_slow(self) -> bool:
        """True if waiting for each write would slow training down."""
        return self._slow >= SLOW_WRITES

    def try_again(self) -> None:
        """Count a slow disk as fast. If one of the next `WINDOW` writes is slow, the disk is slow again."""
        self._writes, self._slow, self._suspected = 0, SLOW_WRITES - 1, True

    def _took(self, ns: int) -> None:
        if self._writes >= WINDOW:
            self._writes, self._slow, self._suspected = 0, 0, False
        self._writes += 1
        if ns > SLOW_WRITE_NS:
            self._slow += self._suspected
            self._suspected = True


def write_keeping_the_gil(fd: int, data: bytes) -> int:
    """Write like `os.write`, but keep the GIL, so that other threads do not make the call longer.

    Raises:
        OSError: Nothing was written.
    """
    written: int = _write(fd, data, len(data))
    # On failure, os.write makes the call again: it raises the right error, and retries after EINTR.
    return written if written >= 0 else os.write(fd, data)


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

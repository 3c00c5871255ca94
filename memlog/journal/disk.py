"""How long the disk takes for a write, apart from what Python's threads take from each other."""

from __future__ import annotations

import ctypes
import os
import time

SLOW_WRITE_NS = 1_000_000
"""A write that takes longer than this is slow."""
SLOW_WRITES = 20
"""The disk is slow where so many of `WINDOW` writes are: one hiccup does not count."""
WINDOW = 200

_write = ctypes.PyDLL(None).write
_write.argtypes = (ctypes.c_int, ctypes.c_char_p, ctypes.c_size_t)
_write.restype = ctypes.c_ssize_t


class Disk:
    """Writes, and judges by the time that it takes whether the disk is slow.

    ``os.write`` gives up Python's lock (the GIL). Where another thread computes meanwhile, getting it back
    takes 5 ms and more, and none of that is the disk's. So a slow write is a suspicion alone: those after
    it, up to the end of the window, keep the lock, and theirs is the time that counts.
    """

    def __init__(self) -> None:
        self._writes = self._slow = 0
        self._suspected = False

    def write(self, fd: int, data: bytes) -> int:
        """``write(2)``: the number of bytes that it took.

        Raises:
            OSError: it took none.
        """
        begun = time.perf_counter_ns()
        written = write_keeping_the_lock(fd, data) if self._suspected else os.write(fd, data)
        self._took(time.perf_counter_ns() - begun)
        return written

    @property
    def is_slow(self) -> bool:
        """Whether waiting for each write would hold training up."""
        return self._slow >= SLOW_WRITES

    def try_again(self) -> None:
        """It was slow, and may no longer be: until the window is over, one slow write tells that it is."""
        self._writes, self._slow, self._suspected = 0, SLOW_WRITES - 1, True

    def _took(self, ns: int) -> None:
        if self._writes >= WINDOW:
            self._writes, self._slow, self._suspected = 0, 0, False
        self._writes += 1
        if ns > SLOW_WRITE_NS:
            self._slow += self._suspected
            self._suspected = True


def write_keeping_the_lock(fd: int, data: bytes) -> int:
    """Like `os.write`, but for the lock that it keeps, so that no other thread's work is in its time.

    Raises:
        OSError: it took none.
    """
    written: int = _write(fd, data, len(data))
    # Why it failed Python tells, which also goes on after a signal.
    return written if written >= 0 else os.write(fd, data)

"""Write to a disk and detect that it is slow. Time that a thread waits for the GIL does not count."""

from __future__ import annotations

import ctypes
import os
import time

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

"""File descriptors that memlog keeps open in a program that may close all descriptors.

A program that becomes a daemon closes every descriptor. The system then gives the same number to another
file. If memlog wrote to that number or closed it, it would harm that file.
"""

from __future__ import annotations

import fcntl
import os
import resource

_HIGH = 4096
"""Descriptors get numbers from three quarters of this on, or of the allowed number if that is less. Few
programs open so many files."""


class Descriptor:
    """A descriptor that memlog owns and closes only if its number still refers to its file.

    It moves to a high number at once. A program that closes all descriptors and then opens files gets the
    lowest numbers for them. A write by memlog then fails instead of reaching one of those files.

    Args:
        number: An open descriptor, which this object takes over.

    Attributes:
        number: Current number; -1 once it is closed.
    """

    def __init__(self, number: int) -> None:
        self.number = number
        self._file = os.fstat(number)
        self.number = _moved(number)

    def status(self) -> os.stat_result | None:
        """Return the file's status; ``None`` if it is closed or the number refers to another file."""
        try:
            status = os.fstat(self.number)
        except OSError:
            return None
        return status if self.stands_for(status) else None

    def stands_for(self, status: os.stat_result) -> bool:
        """Return True if ``status`` belongs to the file that was opened."""
        return os.path.samestat(status, self._file)

    def close(self) -> None:
        """Close the file if the number still refers to it. Calling it again is harmless."""
        if self.number >= 0 and self.status() is not None:
            os.close(self.number)
        self.number = -1

    def __del__(self) -> None:
        """Close the file if an interruption came before `close`."""
        self.close()


def _moved(number: int) -> int:
    allowed, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    lowest = (_HIGH if allowed == resource.RLIM_INFINITY else min(allowed, _HIGH)) * 3 // 4
    if number >= lowest:
        return number
    try:
        high = fcntl.fcntl(number, fcntl.F_DUPFD_CLOEXEC, lowest)
    except OSError:  # no number above is free
        return number
    os.close(number)
    return high

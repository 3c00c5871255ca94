"""Descriptors that memlog keeps open beside a program that may close them all.

A program that becomes a daemon closes every descriptor, and the number is soon another file's: what is then
written to it, or closes it, harms that file.
"""

from __future__ import annotations

import fcntl
import os
import resource

_HIGH = 4096
"""Numbers that few programs reach: below three quarters of so many, or of what is allowed."""


class Descriptor:
    """A descriptor of memlog's own, closed only where its number still stands for it.

    It moves to a high number at once: whoever closes them all, and opens files of its own, gets the lowest
    ones for these. What is written here then meets no file, rather than a stranger's.

    Args:
        number: It is taken over.

    Attributes:
        number: Its number now; -1 once it is closed.
    """

    def __init__(self, number: int) -> None:
        self.number = number
        self._file = os.fstat(number)
        self.number = _moved(number)

    def status(self) -> os.stat_result | None:
        """What the system says of its file now; ``None`` where it is closed, or the number another's."""
        try:
            status = os.fstat(self.number)
        except OSError:
            return None
        return status if self.stands_for(status) else None

    def stands_for(self, status: os.stat_result) -> bool:
        """Whether ``status`` is of the file that was opened."""
        return os.path.samestat(status, self._file)

    def close(self) -> None:
        """Closes it where it is still what was opened. Calling it again is harmless."""
        if self.number >= 0 and self.status() is not None:
            os.close(self.number)
        self.number = -1

    def __del__(self) -> None:
        """Nothing stays open of what was interrupted before anybody could close it."""
        self.close()


def _moved(number: int) -> int:
    allowed, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    lowest = (_HIGH if allowed == resource.RLIM_INFINITY else min(allowed, _HIGH)) * 3 // 4
    if number >= lowest:
        return number
    try:
        high = fcntl.fcntl(number, fcntl.F_DUPFD_CLOEXEC, lowest)
    except OSError:  # there is no room above
        return number
    os.close(number)
    return high

"""File descriptors that memlog keeps open, also in forked copies of the program."""

from __future__ import annotations

import os
from contextlib import suppress


class Descriptor:
    """A file descriptor of memlog. `close` never closes another file that has got the same number.

    A program that becomes a daemon forks and closes every descriptor. The system may then give the same
    number to a file of the program.

    The object takes over ``number``, an open descriptor. After `close`, ``number`` is -1.
    """

    def __init__(self, number: int) -> None:
        self.number = number
        self._opened = [os.fstat(number)]
        """The file's status when it was opened; empty after `close`."""

    def status(self) -> os.stat_result | None:
        """Return the file's status; ``None`` if ``number`` no longer refers to the file."""
        try:
            status = os.fstat(self.number)
        except OSError:
            return None
        return status if any(os.path.samestat(status, opened) for opened in self._opened) else None

    def close(self) -> None:
        """Close the file if ``number`` still refers to it. A second call is harmless, also from a thread."""
        try:
            opened = self._opened.pop()  # by one thread only
        except IndexError:
            return
        with suppress(OSError):
            if os.path.samestat(os.fstat(self.number), opened):
                os.close(self.number)
        self.number = -1

    def __del__(self) -> None:
        """Close the file if `close` was not called, for example because of an interruption."""
        self.close()

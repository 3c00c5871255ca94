"""File descriptors that memlog keeps open, also in forked copies of the program."""

from __future__ import annotations

import os


class Descriptor:
    """A file descriptor of memlog. `close` never closes another file that has got the same number.

    A program that becomes a daemon forks and closes every descriptor. The system may then give the same
    number to a file of the program.

    The object takes over ``number``, an open descriptor. After `close`, ``number`` is -1.
    """

    def __init__(self, number: int) -> None:
        self.number = number
        self._file = os.fstat(number)

    def status(self) -> os.stat_result | None:
        """Return the file's status; ``None`` if ``number`` no longer refers to the file."""
        try:
            status = os.fstat(self.number)
        except OSError:
            return None
        return status if os.path.samestat(status, self._file) else None

    def close(self) -> None:
        """Close the file if ``number`` still refers to it. A second call is harmless."""
        if self.number >= 0 and self.status() is not None:
            os.close(self.number)
        self.number = -1

    def __del__(self) -> None:
        """Close the file if `close` was not called, for example because of an interruption."""
        self.close()

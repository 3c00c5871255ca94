"""Detection of ``fork`` by comparing one number, and locks that are created anew in the child.

A comparison of process ids would cost a system call at each step. Instead, Python calls a function of this
module in each child, and the function increases the number.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from contextlib import suppress
from weakref import WeakKeyDictionary

generation = 0
"""Number of forks between the first process and this one.

An object can store this number to detect a fork later. In the child process, the number is larger.
"""
has_children = False
"""True if this process has forked since this module was loaded."""

_locks: WeakKeyDictionary[object, dict[str, Callable[[], object]]] = WeakKeyDictionary()
"""Locks by owner and attribute name. Each value is the function that creates a new lock."""


def _forked() -> None:
    global generation, has_children  # noqa: PLW0603 - other modules read them
    generation += 1
    has_children = False
    for owner, locks in list(_locks.items()):
        for attribute, make in locks.items():
            setattr(owner, attribute, make())


def renew(owner: object, attribute: str, make: Callable[[], object]) -> None:
    """Replace a lock by a new lock in every child process that a fork creates.

    A fork also copies locks that other threads hold. No thread of the child could release these copies.
    ``owner`` is the module or object that has the lock. memlog does not keep the owner alive. ``attribute``
    is the lock's name in ``owner``. ``make`` creates the new lock.
    """
    _locks.setdefault(owner, {})[attribute] = make


def _has_forked() -> None:
    global has_children  # noqa: PLW0603 - other modules read it
    has_children = True


os.register_at_fork(after_in_parent=_has_forked, after_in_child=_forked)


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

"""Detection of ``fork`` by comparing one number, and locks that are created anew in the child.

A comparison of process ids would cost a system call at each step. Instead, Python calls a function of this
module in each child, and the function increases the number.
"""

from __future__ import annotations

import os
from collections.abc import Callable
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

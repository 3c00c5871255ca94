"""Knowing, for the price of a comparison, that this process is the child of a ``fork``.

Asking for the process number at each step would be a system call; Python itself tells children.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from weakref import WeakKeyDictionary

generation = 0
"""How often this process's line has forked: who remembers another number was copied."""


_locks: WeakKeyDictionary[object, dict[str, Callable[[], object]]] = WeakKeyDictionary()
"""How to make each lock anew, by its owner and its name."""


def _forked() -> None:
    global generation  # noqa: PLW0603 - that is what it is for
    generation += 1
    for owner, locks in list(_locks.items()):
        for attribute, make in locks.items():
            setattr(owner, attribute, make())


def renew(owner: object, attribute: str, make: Callable[[], object]) -> None:
    """Gives every child a lock of its own: the thread that held the parent's is not there to release it.

    Args:
        owner: Who has the lock: a module, or an object, which this does not keep alive.
        attribute: Under which name.
        make: Makes a new one.
    """
    _locks.setdefault(owner, {})[attribute] = make


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_forked)

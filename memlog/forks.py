"""Knowing, for the price of a comparison, that this process is the child of a ``fork``.

Asking for the process number at each step would be a system call; Python itself tells children.
"""

from __future__ import annotations

import os
from collections.abc import Callable

generation = 0
"""How often this process's line has forked: who remembers another number was copied."""


def _forked() -> None:
    global generation  # noqa: PLW0603 - that is what it is for
    generation += 1


def renew(owner: object, attribute: str, make: Callable[[], object]) -> None:
    """Gives every child a lock of its own: the thread that held the parent's is not there to release it.

    Args:
        owner: Who has the lock, for as long as the process lives: a module, or its one object of a kind.
        attribute: Under which name.
        make: Makes a new one.
    """
    if hasattr(os, "register_at_fork"):
        os.register_at_fork(after_in_child=lambda: setattr(owner, attribute, make()))


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_forked)

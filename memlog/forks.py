"""Knowing, for the price of a comparison, that this process is the child of a ``fork``.

Asking for the process number at each step would be a system call; Python itself tells children.
"""

from __future__ import annotations

import os

generation = 0
"""How often this process's line has forked: who remembers another number was copied."""


def _forked() -> None:
    global generation  # noqa: PLW0603 - that is what it is for
    generation += 1


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_forked)

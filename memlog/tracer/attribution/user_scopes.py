"""Names for what is no module: a function, an equation's term, a stage of a pipeline.

A scope is told to every trace that is open, as torch's hooks tell them of modules, and stands among the
layers in parentheses.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Protocol

from memlog._internal import fork
from memlog.errors import ConfigurationError

_MAX_LENGTH = 100


class Scope:
    """Stands where a module would; its name is its place.

    Args:
        name: What it is called.
    """

    __slots__ = ("name",)

    def __init__(self, name: str) -> None:
        self.name = name


class ScopeListener(Protocol):
    """What is told of scopes. Never raises."""

    def scope_begins(self, scope: Scope) -> None:
        """A scope begins on this thread."""

    def scope_ends(self, scope: Scope) -> None:
        """It has ended."""


class _Listeners:
    """Those that are open; replaced whole, so that a scope tells its end to whom it told its beginning."""

    def __init__(self) -> None:
        self.now: tuple[ScopeListener, ...] = ()
        self._lock = threading.Lock()

    def add(self, listener: ScopeListener) -> None:
        with self._lock:
            self.now = (*self.now, listener)

    def remove(self, listener: ScopeListener) -> None:
        with self._lock:
            self.now = tuple(one for one in self.now if one is not listener)


LISTENERS = _Listeners()
fork.renew(LISTENERS, "_lock", threading.Lock)


@contextmanager
def scope(name: str) -> Iterator[None]:
    """What is allocated in the block, or in the function that this decorates, belongs to ``name``.

    ::

        with scope("advection"):
            velocity = advect.semi_lagrangian(velocity, velocity, dt)
        diffuse = scope("diffusion")(diffuse.explicit)

    Scopes and modules nest: the path is that of what surrounds it with ``(name)`` behind. Where nothing is
    traced it does nothing. Its part of the backward pass is known on the CPU; on a GPU that counts with what
    surrounds it.

    Args:
        name: Up to 100 characters without a dot, which separates layers.

    Raises:
        ConfigurationError: ``name`` is none.
    """
    if not name or "." in name or len(name) > _MAX_LENGTH:
        raise ConfigurationError(
            f"scope {name!r}: give it a name of 1 to {_MAX_LENGTH} characters without a dot"
        )
    told, here = LISTENERS.now, Scope(name)
    for listener in told:
        listener.scope_begins(here)
    try:
        yield
    finally:
        for listener in reversed(told):
            listener.scope_ends(here)

"""Scopes: user-given names for code that is no module, such as an equation's term or a pipeline stage.

A scope reports its begin and end to every open trace, as torch's hooks do for modules. A scope is listed
among the layers, in parentheses.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, NamedTuple

from memlog.errors import ConfigurationError
from memlog.tracer.shared_hook import SharedHook

if TYPE_CHECKING:
    from memlog.tracer.module_hooks import Hooks

_MAX_LENGTH = 100


class UserScope(NamedTuple):
    """Placeholder for a running scope. Hooks handle it like a module."""

    name: str


LISTENERS: SharedHook[Hooks] = SharedHook()
"""Hooks of the open traces. The end of a scope is reported to the traces that were open when the scope
began."""


@contextmanager
def scope(name: str) -> Iterator[None]:
    """Give a name to all memory that the block, or the decorated function, allocates.

    ::

        with scope("advection"):
            velocity = advect.semi_lagrangian(velocity, velocity, dt)
        diffuse = scope("diffusion")(diffuse.explicit)

    Scopes and modules can contain each other. The path of a scope is the path of the layer around it,
    followed by ``(name)``. Without an open trace, a scope does nothing. On the CPU, the scope's part of the
    backward pass counts for the scope. On a GPU, that part counts for the layer around the scope.

    Args:
        name: Name of 1 to 100 characters. It has no dot, because a dot separates layers.

    Raises:
        ConfigurationError: ``name`` is empty, is longer, or has a dot.
    """
    if not name or "." in name or len(name) > _MAX_LENGTH:
        raise ConfigurationError(
            f"scope {name!r}: give it a name of 1 to {_MAX_LENGTH} characters without a dot"
        )
    listeners, here = LISTENERS.holders, UserScope(name)
    for listener in listeners:
        listener.scope_begins(here)
    try:
        yield
    finally:
        for listener in reversed(listeners):
            listener.scope_ends(here)

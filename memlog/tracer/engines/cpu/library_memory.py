"""Memory that a library takes at an operation and keeps for later operations, such as cuBLAS's workspaces.

Only estimates have it: on the CPU, libraries do not take such memory from torch's allocator.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any, Protocol

from torch import Tensor


class Libraries(Protocol):
    """Libraries that keep memory."""

    @property
    def kept(self) -> Sequence[Tensor]:
        """Memory that the libraries have taken so far."""

    def take(self, func: Any) -> Sequence[Tensor]:
        """Return the memory that a library takes at a call of the operation ``func``."""


_libraries: Libraries | None = None


@contextmanager
def counted(libraries: Libraries) -> Iterator[None]:
    """Inside the block, traces count the memory of ``libraries``."""
    global _libraries  # noqa: PLW0603 - the engine takes no argument for it
    _libraries = libraries
    try:
        yield
    finally:
        _libraries = None


def kept() -> Sequence[Tensor]:
    return () if _libraries is None else _libraries.kept


def taken_by(func: Any) -> Sequence[Tensor]:
    """Return the memory that a library takes at a call of the operation ``func``."""
    return () if _libraries is None else _libraries.take(func)

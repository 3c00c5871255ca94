"""How much memory Python's young garbage holds: objects in cycles that it has not come to collect yet.

Python collects after every few hundred new objects, which may hold any number of bytes: memory then grows
for a hundred steps and falls. What the collection frees may stay with the C library, so its own books are
read, and not the resident set.
"""

from __future__ import annotations

import ctypes
import gc
from contextlib import suppress
from typing import Any, NamedTuple


class Collection(NamedTuple):
    """What collecting young garbage came to."""

    freed: int
    """Bytes that this freed."""
    left: int
    """Bytes that are in use after it."""


def collect_garbage() -> Collection | None:
    """Collects young garbage now.

    Returns:
        What this freed and left; ``None`` where that is not known: the C library keeps no such books, or
        collecting is switched off.
    """
    if not gc.isenabled():
        return None
    before = _in_use()
    gc.collect(1)
    after = _in_use()
    if before is None or after is None:
        return None
    return Collection(max(before - after, 0), after)


class _MallocInfo(ctypes.Structure):
    """What glibc 2.33 and later tell: see ``mallinfo2(3)``."""

    _fields_ = (
        ("arena", ctypes.c_size_t),
        ("ordblks", ctypes.c_size_t),
        ("smblks", ctypes.c_size_t),
        ("hblks", ctypes.c_size_t),
        ("hblkhd", ctypes.c_size_t),
        ("usmblks", ctypes.c_size_t),
        ("fsmblks", ctypes.c_size_t),
        ("uordblks", ctypes.c_size_t),
        ("fordblks", ctypes.c_size_t),
        ("keepcost", ctypes.c_size_t),
    )


def _in_use() -> int | None:
    """Bytes that are allocated from the C library, in all its arenas and mapped ones."""
    with suppress(AttributeError, OSError):
        mallinfo: Any = ctypes.CDLL(None).mallinfo2
        mallinfo.restype = _MallocInfo
        info = mallinfo()
        return int(info.uordblks + info.hblkhd)
    return None

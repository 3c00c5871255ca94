"""What the C library's allocator tells of itself."""

from __future__ import annotations

import ctypes
from contextlib import suppress
from typing import Any, NamedTuple


class Heap(NamedTuple):
    """Bytes of this process's heap, over all arenas."""

    in_use: int
    """Allocated, mapped blocks included."""
    idle: int
    """Held by the allocator though nothing uses them."""


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


def read_heap() -> Heap | None:
    """Read the allocator's own books; ``None`` if the C library keeps none."""
    with suppress(AttributeError, OSError):
        mallinfo: Any = ctypes.CDLL(None).mallinfo2
        mallinfo.restype = _MallocInfo
        info = mallinfo()
        return Heap(int(info.uordblks + info.hblkhd), int(info.fordblks))
    return None

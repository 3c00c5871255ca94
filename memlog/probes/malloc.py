"""Figures of the C library's allocator."""

from __future__ import annotations

import ctypes
from contextlib import suppress
from typing import Any, NamedTuple


class Heap(NamedTuple):
    """Heap of this process, over all arenas, in bytes."""

    in_use: int
    """Bytes allocated, including mapped blocks."""
    idle: int
    """Free bytes that the allocator keeps."""


class _MallocInfo(ctypes.Structure):
    """Result of ``mallinfo2(3)``, in glibc 2.33 and later."""

    _names = "arena ordblks smblks hblks hblkhd usmblks fsmblks uordblks fordblks keepcost"
    _fields_ = tuple((name, ctypes.c_size_t) for name in _names.split())


def read_heap() -> Heap | None:
    """Read the allocator's figures; ``None`` if the C library has none."""
    with suppress(AttributeError, OSError):
        mallinfo: Any = ctypes.CDLL(None).mallinfo2
        mallinfo.restype = _MallocInfo
        info = mallinfo()
        return Heap(int(info.uordblks + info.hblkhd), int(info.fordblks))
    return None

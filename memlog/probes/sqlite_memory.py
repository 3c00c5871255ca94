"""Memory of SQLite's library, in which ``sqlite3`` keeps databases in memory and caches of pages."""

from __future__ import annotations

import ctypes
import sys
from contextlib import suppress
from typing import Any


def read_sqlite_bytes() -> int:
    """Return the bytes that SQLite has allocated; 0 if the process doesn't use it, or they are unknown."""
    module = sys.modules.get("_sqlite3")
    if module is None:
        return 0
    with suppress(AttributeError, OSError):
        # The extension is linked with the library, so its symbols are found through it.
        library: Any = ctypes.CDLL(getattr(module, "__file__", None))
        used = library.sqlite3_memory_used
        used.restype = ctypes.c_int64
        return int(used())
    return 0

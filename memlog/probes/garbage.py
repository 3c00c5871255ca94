"""How much memory Python's young garbage holds: objects in cycles that it has not come to collect yet.

Python collects after every few hundred new objects, which may hold any number of bytes: memory then grows
for a hundred steps and falls. What the collection frees may stay with the C library, so its own books are
read, and not the resident set.
"""

from __future__ import annotations

import gc
from typing import NamedTuple

from memlog.probes.malloc import read_heap


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
    before = read_heap()
    gc.collect(1)
    after = read_heap()
    if before is None or after is None:
        return None
    return Collection(max(before.in_use - after.in_use, 0), after.in_use)

"""Memory held by Python's garbage: objects in reference cycles that are not collected yet.

Python collects garbage after every few hundred new objects, however large these objects are. So memory can
grow for a hundred steps and then fall. Garbage that has survived two collections waits for a full collection.
If each step makes few objects, no full collection comes for thousands of steps. The C library can keep the
memory that a collection frees. So this module reads the C library's figures and not the resident set.
"""

from __future__ import annotations

import gc
from typing import NamedTuple

from memlog.probes.malloc import read_heap


class Collection(NamedTuple):
    """Result of collecting garbage, in bytes."""

    freed: int
    left: int
    """Bytes of the C library's heap that are still in use after the collection."""


def collect_garbage(*, old: bool = False) -> Collection | None:
    """Collect garbage now. Return the bytes of the heap that were freed, and those still in use.

    Collecting young garbage takes a millisecond. With ``old``, old garbage is collected, too, which takes 0.1
    to 0.3 s for a million objects. The result is ``None`` if garbage collection is switched off, or if the C
    library does not tell the bytes in use.
    """
    if not gc.isenabled():
        return None
    before = read_heap()
    gc.collect(2 if old else 1)
    after = read_heap()
    if before is None or after is None:
        return None
    return Collection(max(before.in_use - after.in_use, 0), after.in_use)

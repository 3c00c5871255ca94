"""Memory held by Python's garbage: objects in reference cycles that are not collected yet.

Python collects garbage after every few hundred new objects, however large these objects are. So memory can
grow for a hundred steps and then fall. Garbage that has survived two collections waits for a full collection.
If each step makes few objects, no full collection comes for thousands of steps. The C library can keep the
memory that a collection frees. So this module reads the C library's figures and not the resident set.

Garbage can hold memory of a device, too. The device's allocator reports it as given out until the collection.
"""

from __future__ import annotations

import gc
import sys
from collections.abc import Callable
from typing import NamedTuple

from memlog.probes.malloc import read_heap


class Collection(NamedTuple):
    """Result of collecting garbage, in bytes."""

    freed: int
    left: int
    """Bytes that are still in use after the collection."""


def heap_in_use() -> int | None:
    """Return the bytes of the C library's heap that are in use; ``None`` if the library does not tell."""
    heap = read_heap()
    return None if heap is None else heap.in_use


def device_in_use(name: str) -> int | None:
    """Return the bytes that tensors hold on a device, such as ``cuda0``; ``None`` if unknown."""
    kind = name.rstrip("0123456789")
    try:
        module = getattr(sys.modules["torch"], kind)
        if kind == "mps":
            return int(module.current_allocated_memory())
        return int(module.memory_allocated(int(name[len(kind) :])))
    except Exception:  # noqa: BLE001 - a device that can't be read must not end training
        return None


def collect_garbage(
    *, old: bool = False, in_use: Callable[[], int | None] = heap_in_use
) -> Collection | None:
    """Collect garbage now. Return the bytes that were freed, and those still in use.

    Collecting young garbage takes a millisecond. With ``old``, old garbage is collected, too, which takes 0.1
    to 0.3 s for a million objects. ``in_use`` returns the bytes in use, by default of the C library's heap.
    The result is ``None`` if garbage collection is switched off, or if these bytes are unknown.
    """
    if not gc.isenabled():
        return None
    before = in_use()
    gc.collect(2 if old else 1)
    after = in_use()
    if before is None or after is None:
        return None
    return Collection(max(before - after, 0), after)

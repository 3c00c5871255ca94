"""Figures of allocators: C's, SQLite's, torch's for CUDA and pinned memory, and Python's garbage.

Python collects garbage after every few hundred new objects, however large these objects are. So memory can
grow for a hundred steps and then fall. Garbage that has survived two collections waits for a full collection.
If each step makes few objects, no full collection comes for thousands of steps. The C library can keep the
memory that a collection frees. So this module reads the C library's figures and not the resident set.

Garbage can hold memory of a device, too. The device's allocator reports it as given out until the collection.
"""

from __future__ import annotations

import ctypes
import gc
import inspect
import os
import sys
from collections.abc import Callable, Mapping
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


class PinnedSizes(NamedTuple):
    """Pinned memory of this process, in bytes."""

    held: int
    """Bytes in blocks in use and in freed blocks, which the allocator keeps for later requests."""
    in_use: int
    peak: int
    """Highest ``held`` since the process began, or since other code last reset this statistic."""


def read_pinned() -> PinnedSizes | None:
    """Return the pinned memory that torch holds; ``None`` if unknown, or if CUDA is not initialised.

    A call takes about 5 µs. Memory that a program locks in another way does not count.
    """
    cuda: Any = getattr(sys.modules.get("torch"), "cuda", None)
    read = getattr(cuda, "host_memory_stats_as_nested_dict", None)  # torch before 2.7 lacks it
    stats = {} if read is None else read()
    if "reserved_bytes" in stats:  # older versions, in which ``allocated_bytes`` are those in use
        held, in_use = stats["reserved_bytes"], stats["allocated_bytes"]
    elif "active_bytes" in stats:
        held, in_use = stats["allocated_bytes"], stats["active_bytes"]
    else:
        return None
    return PinnedSizes(int(held["current"]), int(in_use["current"]), int(held["peak"]))


def allocator_settings(torch: Any) -> str:
    """Return the allocator's settings, as in the variable ``PYTORCH_ALLOC_CONF``; empty: the defaults.

    Older versions of torch have no function that returns the settings. With those, return the variable.
    """
    settings = getattr(torch._C, "_accelerator_getAllocatorSettings", None)  # noqa: SLF001 - no public way
    if settings is not None:
        return str(settings())
    names = ("PYTORCH_CUDA_ALLOC_CONF", "PYTORCH_ALLOC_CONF")
    return next((os.environ[name] for name in names if name in os.environ), "")


def has_expandable_segments(settings: str | None) -> bool:
    """Return True if the settings turn on expandable segments. ``None``: unknown settings."""
    return "expandable_segments:True" in (settings or "")


def records_history(torch: Any, kind: str = "cuda") -> bool:
    """Return True if the allocator of a kind of devices records a history of allocations."""
    is_on = getattr(torch._C, f"_{kind}_isHistoryEnabled", None)  # noqa: SLF001 - no public way
    return is_on is not None and bool(is_on())


def segments_without_history(torch: Any) -> list[Mapping[str, Any]] | None:
    """Return the segments of all CUDA devices; ``None`` if reading them could take long.

    A recorded history can have millions of entries. Older versions of torch copy it with the segments.
    """
    memory_snapshot = torch.cuda.memory.memory_snapshot
    if "include_traces" in inspect.signature(memory_snapshot).parameters:
        found: list[Mapping[str, Any]] = memory_snapshot(include_traces=False)
        return found
    return None if records_history(torch) else memory_snapshot()


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

"""Causes of growth that no Python object shows, found by elimination.

Growth of child processes and of shared memory is not explained here. They are separate series.
"""

from __future__ import annotations

from memlog._internal.units import format_bytes
from memlog.leaks.holders import Holder

_MOST: float = 0.5
"""Minimum fraction of the growth that a cause has to explain."""


def by_elimination(
    rate: float,
    *,
    explained: float,
    malloc_used: float,
    malloc_free: float,
    profiling: bool,
) -> Holder | None:
    """Return the cause that the figures of the C library's allocator show; ``None`` if they show none.

    Args:
        rate: Growth in bytes per step.
        explained: Bytes per step that Python objects explain.
        malloc_used: Growth per step of the bytes that the C library's allocator has given out.
        malloc_free: Growth per step of the free bytes that the C library's allocator keeps.
        profiling: True if torch's profiler records. The profiler keeps its events in C++ until it is stopped.
    """
    least = _MOST * rate
    if explained >= least:
        return None
    if malloc_free >= least:
        return _free_lists(malloc_free)
    if malloc_used - explained >= least:
        return _native(malloc_used - explained, explained, profiling=profiling)
    return None


def _free_lists(rate: float) -> Holder:
    return Holder(
        "allocator_free_lists",
        f"The C library's allocator keeps {format_bytes(rate)} more of free memory per step.",
        None,
        rate,
        ("what the program uses does not grow; what the allocator keeps free does",),
        "medium",
        "Set `MALLOC_ARENA_MAX=2` or `MALLOC_TRIM_THRESHOLD_=131072`, or use jemalloc.",
    )


def _native(rate: float, explained: float, *, profiling: bool) -> Holder:
    title = f"A C or C++ library allocates {format_bytes(rate)} per step and does not free it."
    remedy = "Run some steps with `heaptrack python …` or `memray run --native` to see the caller."
    if profiling:
        title = f"torch's profiler is on: it keeps {format_bytes(rate)} of events per step."
        remedy = "Stop the profiler, or give it a `schedule` that ends (`torch.profiler.schedule`)."
    return Holder(
        "native_library",
        title,
        None,
        rate,
        (
            f"memory from malloc grows by {format_bytes(rate + explained)} per step",
            f"Python objects and tensors explain {format_bytes(explained)} of it",
        ),
        "medium",
        remedy,
    )

"""Device memory beyond that of tensors: bytes that CUDA's allocator reserves, the context, and libraries."""

from __future__ import annotations

from collections.abc import Iterable
from typing import NamedTuple

from memlog._internal.units import MIB
from memlog.estimates.caching_allocator import CachingAllocator, OutOfMemoryError
from memlog.trace import encoding
from memlog.trace.records import RecordedTrace

_REPEATS = 2
"""Number of replays of the step. The first replay leaves free blocks, as earlier steps do on a device."""


class SizeRange(NamedTuple):
    """Lowest and highest estimate, in bytes, of memory whose exact size is unknown."""

    low: int
    high: int
    what: str
    source: str


CONTEXT = SizeRange(
    256 * MIB,
    640 * MIB,
    "the CUDA context, with kernels loaded as they are used (CUDA 11.7 and newer)",
    "about 300 and 400 MiB: pytorch/pytorch#107667, #109888; 616 MiB: LMCache/LMCache#4019",
)
WORKSPACES = SizeRange(
    8_519_680,
    64 * MIB,
    "workspaces of cuBLAS and cuBLASLt",
    "8,519,680 bytes in a snapshot (discuss.pytorch.org/t/178671); 32 MiB each from Hopper on "
    "(pytorch/pytorch#120925)",
)


def reserved(
    trace: RecordedTrace, limit: int | None = None, *, expandable: bool = False
) -> int | None:
    """Return the maximum number of bytes that CUDA's caching allocator reserves for a traced step.

    ``trace`` must have all events of the step. ``limit`` and ``expandable`` are as for `CachingAllocator`.
    The result is ``None`` if the step does not fit below the limit.
    """
    allocator = CachingAllocator(limit, expandable=expandable)
    events = tuple(encoding.decode_with_allocations(trace.events))
    begun = {
        event.key: event.size
        for event, _allocation in events
        if event.kind == encoding.ALLOC and event.phase == encoding.BEFORE
    }
    live: set[int] = set()
    try:
        for _ in range(_REPEATS):
            # Undo the previous replay: each replay begins with the storages from before the trace.
            for key in live - begun.keys():
                allocator.free(key)
            for key in sorted(begun.keys() - live):
                allocator.allocate(key, begun[key])
            live = set(begun)
            _replay(allocator, events, live)
    except OutOfMemoryError:
        return None
    return allocator.most_reserved


def _replay(
    allocator: CachingAllocator,
    events: Iterable[tuple[encoding.StreamEvent, encoding.StreamEvent | None]],
    live: set[int],
) -> None:
    """Replay a step's events, and update ``live``, the keys of live storages."""
    for event, allocation in events:
        if event.kind == encoding.ALLOC and event.phase != encoding.BEFORE:
            allocator.allocate(event.key, event.size)
            live.add(event.key)
        elif event.kind == encoding.FREE and allocation is not None:
            allocator.free(event.key)
            live.remove(event.key)

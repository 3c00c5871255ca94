"""Causes of growth outside Python's objects, from the figures of the C library's allocator."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from typing import Final, NamedTuple

from memlog._internal.inert_access import is_kind
from memlog._internal.units import format_bytes
from memlog.events import ALLOCATED, SHARED
from memlog.growth.suspicion import Suspicion
from memlog.leaks.holders import Holder
from memlog.leaks.time_budget import TimeBudget
from memlog.probes.malloc import Heap, read_heap
from memlog.probes.sqlite_memory import read_sqlite_bytes

_COUNT_SECONDS: Final = 0.3
"""Maximum processor seconds for adding up the sizes of all tensors. If it takes longer, the sum is
unknown."""
_PART: Final = 0.25
"""If tensors hold more than this fraction of the growth, no cause outside Python is named."""
_FROM_MALLOC: Final = ("kept_graph", "kept_tensors", "forward_without_backward")
"""Kinds of holders whose objects are allocated between those of each step."""
_FOR_SMALL: Final = (
    "Remove old elements, keep only numbers (`.item()`), or copy the elements into one large tensor "
    "that is made in advance. `.detach()` alone leaves a small tensor in its place."
)
_FOR_SLOTS: Final = (
    "Keep the elements in one tensor that is made at the start, "
    "or set `MALLOC_TRIM_THRESHOLD_=131072`."
)
EXPLAINED: Final = 0.5
"""A cause is named only if it explains at least this fraction of the growth."""


class Figures(NamedTuple):
    """Memory of this process at one moment."""

    step: int
    heap: Heap | None
    tensors: int | None
    """Bytes of all tensors that have a Python object."""
    sqlite: int


def figures(step: int) -> Figures:
    tensors: int | None = 0
    if "torch" in sys.modules:
        from memlog.leaks.frame_variables import all_objects  # noqa: PLC0415 - they load parts of torch
        from memlog.leaks.live_tensors import tensor_bytes  # noqa: PLC0415

        budget = TimeBudget(_COUNT_SECONDS)
        with budget.running():
            tensors = tensor_bytes(all_objects(), budget)
    return Figures(step, read_heap(), tensors, read_sqlite_bytes())


def cause_by_elimination(
    growth: Suspicion, before: Figures, explained: float, *, is_ending: bool
) -> Holder | None:
    """Return a cause outside Python objects if the allocator's figures show a cause; otherwise ``None``.

    Return ``None`` also if tensors hold the memory. If ``is_ending`` is true, the allocator's free memory is
    not considered, because the program can have freed this memory after the last step.
    """
    now = figures(growth.step)
    steps = now.step - before.step
    if (
        growth.series == SHARED
        or growth.series.endswith(ALLOCATED)
        or steps <= 0
        or before.heap is None
        or now.heap is None
    ):
        return None
    if before.tensors is None or now.tensors is None:
        return None
    if (now.tensors - before.tensors) / steps >= _PART * growth.rate:
        return None
    in_sqlite = (now.sqlite - before.sqlite) / steps
    if in_sqlite >= EXPLAINED * growth.rate:
        return _sqlite(in_sqlite)
    from memlog.tracer.torch_private import profiling  # noqa: PLC0415 - it needs torch, which is loaded

    return by_elimination(
        growth.rate,
        explained=explained,
        malloc_used=(now.heap.in_use - before.heap.in_use) / steps,
        malloc_free=0.0 if is_ending else (now.heap.idle - before.heap.idle) / steps,
        profiling=profiling(),
    )


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
    least = EXPLAINED * rate
    if explained >= least:
        return None
    if malloc_free >= least:
        return _free_lists(malloc_free)
    if malloc_used - explained >= least:
        return _native(malloc_used - explained, explained, profiling=profiling)
    return None


def between_free_memory(holders: Sequence[Holder]) -> list[Holder]:
    """Return the holder of tensors or graphs that keep the allocator from giving back its free memory.

    Small objects that a program keeps lie between the larger ones that each step frees.
    """
    found = next((one for one in holders if one.kind in _FROM_MALLOC), None)
    if found is None:
        return []
    return [
        found._replace(
            title=f"{found.title} The C library's allocator can't give back the free memory between.",
            evidence=(*found.evidence, "most of the growth is memory that steps free"),
            confidence="medium",
            remedy=_for_elements(found),
        )
    ]


def _for_elements(holder: Holder) -> str | None:
    if holder.is_chain:
        return holder.remedy
    return _FOR_SMALL if holder.bytes_left is None else _FOR_SLOTS


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


def _sqlite(rate: float) -> Holder:
    from memlog.leaks.frame_variables import all_objects  # noqa: PLC0415 - they load parts of torch
    from memlog.leaks.owner_chain import OwnerSearch  # noqa: PLC0415
    from memlog.leaks.owner_text import describe  # noqa: PLC0415

    kind = sys.modules["sqlite3"].Connection
    connections = [one for one in all_objects() if is_kind(one, kind)]
    budget = TimeBudget(_COUNT_SECONDS)
    with budget.running():
        chains = OwnerSearch(budget, [connections]).chains(connections)
    owners = [describe(chain, frozenset()) for chain in chains if chain is not None]
    names = [f"`{one.expression}{one.contents}` {one.place}".rstrip() for one in owners]
    of = f" ({names[0]})" if len(connections) == len(names) == 1 else ""
    return Holder(
        "native_library",
        f"SQLite keeps {format_bytes(rate)} more per step in memory{of}, as a database in `:memory:` does.",
        None,
        rate,
        ("the bytes that SQLite's library has allocated grow",),
        "high",
        "Delete rows that are no longer needed, or keep the database in a file.",
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

"""A trace as the tracer that memlog takes over from told it: events with running totals, layer statistics."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass

from memlog.trace import encoding
from memlog.trace.records import LayerFigures, Trace, TraceResult

_NS_PER_S = 1e9


@dataclass
class LayerMemoryStats:
    """Computed statistics of one layer; ``None`` is unknown."""

    layer_name: str
    peak_allocated: int | None
    """Most bytes live while it or a child was active."""
    peak_reserved: int | None
    """Most bytes that the caching allocator held meanwhile; ``None`` on the CPU."""
    total_allocations: int | None
    """Number of allocations that it made itself; ``None`` where the sampler ran."""
    total_deallocations: int | None
    """How many of them were freed; ``None`` where the sampler ran."""
    avg_fragmentation: float | None
    """Mean of ``(reserved - allocated) / reserved``, 0 to 1; ``None`` on the CPU."""
    duration_ms: float
    """Time in forward and recompute, children included, and its own part of backward."""


@dataclass
class MemoryEvent:
    """One thing that happened; ``None`` is unknown."""

    timestamp: float
    """Seconds since the trace began."""
    event_type: str
    """``alloc``, ``free``, ``snapshot``, ``layer_enter`` or ``layer_exit``."""
    size_bytes: int
    """Of the allocation; 0 for other events."""
    layer_name: str | None
    """Who allocated what is allocated or freed; ``None`` outside all modules."""
    allocated_bytes: int | None
    """Bytes live afterwards, as far as they are known."""
    reserved_bytes: int | None
    """As last read; ``None`` where nothing is reserved."""
    fragmentation_ratio: float | None
    """``(reserved - allocated) / reserved`` as last read."""


_TYPES = {
    encoding.ALLOC: "alloc",
    encoding.FREE: "free",
    encoding.READING: "snapshot",
    encoding.ENTER: "layer_enter",
    encoding.EXIT: "layer_exit",
}


def layer_stats(result: TraceResult) -> dict[str, LayerMemoryStats]:
    """By path, in the model's order; what happened in no module is left out."""
    return {
        layer.path: _stats(layer) for layer in result.layers if layer.path != encoding.OUTSIDE_PATH
    }


def _stats(layer: LayerFigures) -> LayerMemoryStats:
    counted = layer.allocated is not None
    return LayerMemoryStats(
        layer_name=layer.path,
        peak_allocated=layer.peak,
        peak_reserved=layer.reserved_peak,
        total_allocations=_sum(phase.allocations for phase in layer.phases) if counted else None,
        total_deallocations=_sum(phase.frees for phase in layer.phases) if counted else None,
        avg_fragmentation=layer.fragmentation,
        duration_ms=layer.time_ms,
    )


def _sum(counts: Iterable[int | None]) -> int:
    return sum(count or 0 for count in counts)


def replay(trace: Trace) -> Iterator[MemoryEvent]:
    """The kept events with running totals, what was there before the trace included from the start."""
    live: int | None = trace.result.before
    reserved: int | None = None
    ratio: float | None = None
    storages: dict[int, tuple[int, int]] = {}
    for event in encoding.decode(trace.events):
        size, layer = 0, event.layer
        if event.kind == encoding.ALLOC:
            storages[event.key] = event.size, layer
            if event.phase == encoding.BEFORE:
                continue
            size = event.size
            live = None if live is None else live + size
        elif event.kind == encoding.FREE:
            size, layer = storages.pop(event.key, (0, encoding.OUTSIDE))
            live = None if live is None else live - size
        elif event.kind == encoding.READING:
            live = event.key
            reserved = event.size or None
            ratio = (event.size - event.key) / event.size if event.size else None
        if event.kind in _TYPES:
            name = trace.paths[layer] if layer != encoding.OUTSIDE else None
            yield MemoryEvent(
                timestamp=event.time_ns / _NS_PER_S,
                event_type=_TYPES[event.kind],
                size_bytes=size,
                layer_name=name,
                allocated_bytes=live,
                reserved_bytes=reserved,
                fragmentation_ratio=ratio,
            )

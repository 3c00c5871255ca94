"""Export of a trace as events and statistics, in the format of the older tracer that memlog replaces."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import asdict, dataclass
from typing import Any

import msgspec

from memlog.trace import encoding
from memlog.trace.records import LayerFigures, RecordedTrace, TraceResult

_NS_PER_S = 1e9


@dataclass
class LayerMemoryStats:
    """Computed statistics of one layer; ``None`` means unknown."""

    layer_name: str
    peak_allocated: int | None
    """Highest number of live bytes while the layer or a child was active."""
    peak_reserved: int | None
    """Highest number of bytes that the caching allocator had reserved when a call of the layer began or
    ended; ``None`` on the CPU."""
    total_allocations: int | None
    """Number of allocations by the layer itself; ``None`` if the engine is ``sampler``."""
    total_deallocations: int | None
    """Number of allocations by the layer itself that were freed; ``None`` if the engine is ``sampler``."""
    avg_fragmentation: float | None
    """Mean of ``(reserved - allocated) / reserved`` at the layer's entries and exits, 0 to 1; ``None`` on the
    CPU."""
    duration_ms: float
    """Milliseconds in forward and recompute (including children), plus the layer's own time in backward."""


@dataclass
class MemoryEvent:
    """One event of a trace; ``None`` means unknown."""

    timestamp: float
    """Seconds since the trace began."""
    event_type: str
    """``alloc``, ``free``, ``snapshot``, ``layer_enter`` or ``layer_exit``."""
    size_bytes: int
    """Bytes that were allocated or freed; 0 for other events."""
    layer_name: str | None
    """Layer of the event. For a free: the layer that allocated the storage. ``None`` outside all modules."""
    allocated_bytes: int | None
    """Live bytes after the event, including bytes from before the trace; ``None`` while unknown."""
    reserved_bytes: int | None
    """Reserved bytes at the last reading; ``None`` if no memory was reserved, as on the CPU."""
    fragmentation_ratio: float | None
    """``(reserved - allocated) / reserved`` at the last reading."""


_TYPES = {
    encoding.ALLOC: "alloc",
    encoding.FREE: "free",
    encoding.READING: "snapshot",
    encoding.ENTER: "layer_enter",
    encoding.EXIT: "layer_exit",
}


def layer_stats(result: TraceResult) -> dict[str, LayerMemoryStats]:
    """Return the statistics of each layer by path, in the model's order.

    Work outside all modules is left out.
    """
    return {
        layer.path: _stats(layer) for layer in result.layers if layer.path != encoding.OUTSIDE_PATH
    }


def _stats(layer: LayerFigures) -> LayerMemoryStats:
    counted = layer.allocated is not None
    return LayerMemoryStats(
        layer_name=layer.path,
        peak_allocated=layer.peak,
        peak_reserved=layer.reserved_peak,
        total_allocations=sum(one.allocations or 0 for one in layer.phases) if counted else None,
        total_deallocations=sum(one.frees or 0 for one in layer.phases) if counted else None,
        avg_fragmentation=layer.fragmentation,
        duration_ms=layer.time_ms,
    )


def replay(trace: RecordedTrace) -> Iterator[MemoryEvent]:
    """Yield the stored events, each with the bytes that are live after it.

    These bytes include those that were allocated before the trace.
    """
    live: int | None = trace.result.before
    reserved: int | None = None
    ratio: float | None = None
    for event, allocation in encoding.decode_with_allocations(trace.events):
        size, layer = allocation.size if allocation else 0, event.layer
        if event.kind == encoding.ALLOC:
            if event.phase == encoding.BEFORE:
                continue
            live = None if live is None else live + size
        elif event.kind == encoding.FREE:
            live = None if live is None else live - size
            # A FREE event's own layer is another one: the layer whose backward pass read the storage.
            layer = allocation.layer if allocation else encoding.OUTSIDE
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


def timeline(trace: RecordedTrace) -> dict[str, Any]:
    """Build a document of events and statistics.

    The document's key ``summary`` holds all fields of the trace's result except ``layers``. The document has
    another key for the layers.
    """
    summary = msgspec.to_builtins(trace.result)
    layers = summary.pop("layers")
    return {
        "events": [asdict(event) for event in replay(trace)],
        "layer_stats": {name: asdict(stats) for name, stats in layer_stats(trace.result).items()},
        "layers": layers,
        "summary": summary,
    }

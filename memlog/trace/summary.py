"""Trace result as text, as HTML for notebooks, and in the format of the older tracer that memlog replaces.

The HTML has no script and loads nothing. Words keep the notebook's text colour.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import asdict, dataclass
from html import escape
from typing import Any

import msgspec

from memlog._internal.terminal import format_bytes
from memlog.trace import encoding
from memlog.trace.encoding import OUTSIDE_PATH
from memlog.trace.records import LayerFigures, RecordedTrace, TraceResult

_TOP = 12
_TOP_LINES = 6
_PATH_WIDTH = 40


def summary_text(result: TraceResult) -> str:
    """Return peak, categories and the largest layers, in lines of about 100 characters at most."""
    return "\n".join([*_head(result), *_categories(result), *_layers(result), *_foot(result)])


def _head(result: TraceResult) -> Iterator[str]:
    yield (
        f"Memory trace on {result.device}: {result.duration_ms:.1f} ms, {result.events:,} events, "
        f"engine {result.engine} ({result.why}), {result.exactness}"
    )
    if result.peak is not None:
        yield (
            f"Peak {format_bytes(result.peak)} at {result.peak_ms:.1f} ms; "
            f"{format_bytes(result.before)} at the start, {format_bytes(result.end)} at the end"
        )


def _categories(result: TraceResult) -> Iterator[str]:
    if result.categories:
        yield "At the peak: " + ", ".join(
            f"{name} {format_bytes(size)}" for name, size in result.categories.items()
        )


def _layers(result: TraceResult) -> Iterator[str]:
    ranked = sorted(
        result.layers,
        key=lambda figures: (-(figures.at_peak or 0), -(figures.peak or 0), figures.path),
    )
    yield ""
    yield (
        f"{'layer':<{_PATH_WIDTH}} {'at peak':>10} {'allocated':>10} {'peak':>10} {'kept fwd':>10} {'ms':>8}"
    )
    for layer in ranked[:_TOP]:
        path = _cut(layer.path, _PATH_WIDTH)
        forward = layer.phase("forward")
        kept = format_bytes(forward.kept if forward else None)
        yield (
            f"{path:<{_PATH_WIDTH}} {format_bytes(layer.at_peak):>10} {format_bytes(layer.allocated):>10} "
            f"{format_bytes(layer.peak):>10} {kept:>10} {layer.time_ms:>8.1f}"
        )
        if layer.path == OUTSIDE_PATH:
            yield from _lines(result)
    if len(ranked) > _TOP:
        yield f"… and {len(ranked) - _TOP} more"


def _lines(result: TraceResult) -> Iterator[str]:
    for line in result.lines[:_TOP_LINES]:
        shown = f"  {_cut(line.line, _PATH_WIDTH - 2)}"
        yield f"{shown:<{_PATH_WIDTH}} {format_bytes(line.at_peak):>10} {format_bytes(line.allocated):>10}"


def _cut(text: str, width: int) -> str:
    return text if len(text) <= width else "…" + text[1 - width :]


def _foot(result: TraceResult) -> Iterator[str]:
    yield ""
    if result.attributed is not None:
        nowhere = ", ".join(
            f"{format_bytes(size)} in {phase}"
            for phase, size in result.unattributed.items()
            if size
        )
        yield (
            f"{result.attributed:.1%} of the bytes of forward and backward belong to a module"
            + (f"; to none: {nowhere}" if nowhere else "")
        )
    if result.fragmentation is not None:
        reserved = format_bytes(result.fragmentation.reserved)
        unused = result.fragmentation.unused_in_pools
        pools = f"; {format_bytes(unused)} more are free in private pools (CUDA graphs)"
        yield f"Fragmentation {result.fragmentation.ratio:.1%} of {reserved}{pools if unused else ''}"
    elif result.fragmentation_reason:
        yield f"Fragmentation unknown: {result.fragmentation_reason}"
    if result.truncated:
        yield (
            f"Truncated: {result.kept_events:,} of {result.events:,} events are kept one by one; "
            "totals and peaks include all of them"
        )
    for reason, count in result.dropped.items():
        yield f"Missing: {reason} ({count:,})"


_COLOURS = {
    "parameters": "#4269d0",
    "gradients": "#e5a50a",
    "optimizer state": "#8e5bd0",
    "activations": "#f0684c",
    "recompute": "#9c6b4e",
    "temporaries": "#8a94a0",
    "inputs": "#2f9e5f",
    "buffers": "#33b0ad",
    "workspaces": "#7f8c1f",
    "private pools": "#c6529a",
    "unsharded parameters": "#7aa6f5",
    "communication": "#b8860b",
}
"""Colours of the categories. A run's report uses the same colours."""
_OTHER = "#a9b4c2"
_STYLE = (
    ".memlog td,.memlog th{text-align:left;padding:2px 12px 2px 0}"
    ".memlog td+td,.memlog th+th{text-align:right;font-variant-numeric:tabular-nums}"
)


def result_html(result: TraceResult) -> str:
    """Return HTML with the peak, a bar of the categories, and a table of the layers that hold most bytes."""
    parts = [*_head_html(result), *_categories_html(result), *_layers_html(result), *_notes(result)]
    return f'<div class="memlog"><style>{_STYLE}</style>{"".join(parts)}</div>'


def _head_html(result: TraceResult) -> Iterator[str]:
    peak = "unknown" if result.peak is None else format_bytes(result.peak)
    yield f"<p><b>Peak {peak}</b> on {escape(result.device)} in {result.duration_ms:.1f} ms"
    if result.peak is not None:
        yield (
            f", reached at {result.peak_ms:.1f} ms; {format_bytes(result.before)} at the start, "
            f"{format_bytes(result.end)} at the end"
        )
    yield f" ({escape(result.exactness)}, engine {escape(result.engine)})</p>"


def _categories_html(result: TraceResult) -> Iterator[str]:
    total = sum(result.categories.values())
    if not total:
        return
    bar, legend = [], []
    for name, size in result.categories.items():
        colour = _COLOURS.get(name, _OTHER)
        share = size / total
        bar.append(f'<div style="width:{share:.2%};background:{colour}"></div>')
        legend.append(
            f'<span style="white-space:nowrap;margin-right:1.2em"><span style="color:{colour}">&#9632;'
            f"</span> {escape(name)} {format_bytes(size)} ({share:.0%})</span>"
        )
    described = ", ".join(f"{name} {size / total:.0%}" for name, size in result.categories.items())
    yield (
        f'<div role="img" aria-label="At the peak: {escape(described)}" style="display:flex;height:1.4em;'
        f'max-width:56em">{"".join(bar)}</div><p>{" ".join(legend)}</p>'
    )


def _layers_html(result: TraceResult) -> Iterator[str]:
    ranked = sorted(
        result.layers,
        key=lambda figures: (-(figures.at_peak or 0), -(figures.peak or 0), figures.path),
    )
    if not ranked:
        return
    yield (
        "<table><thead><tr><th>layer</th><th>at the peak</th><th>allocated</th><th>ms</th></tr></thead>"
        "<tbody>"
    )
    yield from map(_row, ranked[:_TOP])
    yield "</tbody></table>"
    if len(ranked) > _TOP:
        yield f"<p>and {len(ranked) - _TOP:,} more layers</p>"


def _row(layer: LayerFigures) -> str:
    name = "outside all modules" if layer.path == OUTSIDE_PATH else layer.path
    cells = (format_bytes(layer.at_peak), format_bytes(layer.allocated), f"{layer.time_ms:.1f}")
    return f"<tr><td>{escape(name)}</td>{''.join(f'<td>{cell}</td>' for cell in cells)}</tr>"


def _notes(result: TraceResult) -> Iterator[str]:
    for reason, count in result.dropped.items():
        yield f"<p>Missing: {escape(reason)} ({count:,})</p>"


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
        total_allocations=sum(figures.allocations or 0 for figures in layer.phases)
        if counted
        else None,
        total_deallocations=sum(figures.frees or 0 for figures in layer.phases)
        if counted
        else None,
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

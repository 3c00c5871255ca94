"""Trace result as HTML for notebooks.

The HTML has no script and loads nothing. Words keep the notebook's text colour.
"""

from __future__ import annotations

from collections.abc import Iterator
from html import escape

from memlog._internal.terminal import format_bytes
from memlog.trace.encoding import OUTSIDE_PATH
from memlog.trace.records import LayerFigures, TraceResult

_TOP = 12
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
    parts = [*_head(result), *_categories(result), *_layers(result), *_notes(result)]
    return f'<div class="memlog"><style>{_STYLE}</style>{"".join(parts)}</div>'


def _head(result: TraceResult) -> Iterator[str]:
    peak = "unknown" if result.peak is None else format_bytes(result.peak)
    yield f"<p><b>Peak {peak}</b> on {escape(result.device)} in {result.duration_ms:.1f} ms"
    if result.peak is not None:
        yield (
            f", reached at {result.peak_ms:.1f} ms; {format_bytes(result.before)} at the start, "
            f"{format_bytes(result.end)} at the end"
        )
    yield f" ({escape(result.exactness)}, engine {escape(result.engine)})</p>"


def _categories(result: TraceResult) -> Iterator[str]:
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


def _layers(result: TraceResult) -> Iterator[str]:
    ranked = sorted(
        result.layers, key=lambda one: (-(one.at_peak or 0), -(one.peak or 0), one.path)
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

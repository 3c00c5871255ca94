"""Trace event: a trace in a few hundred bytes, for the bus."""

from __future__ import annotations

from memlog.events import Trace, TracedLayer, TracedLine, now_us
from memlog.trace.encoding import OUTSIDE_PATH
from memlog.trace.records import LayerFigures, TraceResult

TOP = 8
"""Maximum number of layers in a trace event."""
TOP_LINES = 4
"""Maximum number of the program's lines in a trace event."""


def trace_event(result: TraceResult, step: int | None, skipped: int = 0) -> Trace:
    """Return the event of one traced step.

    ``step`` is ``None`` if the step did not end. ``skipped`` windows could not open so far.
    """
    ranked = sorted(result.layers, key=lambda layer: (-(layer.at_peak or 0), layer.path))[:TOP]
    held = sum(share.size for share in result.shares if share.path == OUTSIDE_PATH)
    return Trace(
        time_us=now_us(),
        step=step,
        engine=result.engine,
        exact=result.exactness == "exact",
        peak=result.peak,
        at_peak=result.categories,
        layers=tuple(_layer(layer, readable=result.peak is not None) for layer in ranked),
        unattributed=held if result.shares else None,
        truncated=result.truncated,
        duration_us=round(result.duration_ms * 1000),
        skipped=skipped,
        lines=tuple(
            TracedLine(one.line, one.at_peak) for one in result.lines[:TOP_LINES] if one.at_peak
        ),
    )


def _layer(layer: LayerFigures, *, readable: bool) -> TracedLayer:
    forward = layer.phase("forward")
    nothing = 0 if readable else None
    return TracedLayer(
        path=layer.path,
        at_peak=layer.at_peak,
        peak=layer.peak,
        allocated=layer.allocated,
        kept=forward.kept if forward is not None else nothing,
    )

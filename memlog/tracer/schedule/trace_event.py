"""Trace event: the summary of a trace in a few hundred bytes, for the event bus."""

from __future__ import annotations

from memlog.events import Trace, TracedLayer, TracedLine, now_us
from memlog.trace.encoding import OUTSIDE_PATH
from memlog.trace.records import LayerFigures, TraceResult

TOP = 8
"""Number of the largest layers in a trace event. The event also contains the layers that trackers plot as
curves (see `MAX_SERIES`)."""
MAX_SERIES = 12
"""Maximum number of layers that trackers plot as curves over the steps of a run. Further layers get no
curve."""
TOP_LINES = 4
"""Maximum number of the program's lines in a trace event."""


def trace_event(
    result: TraceResult,
    step: int | None,
    skipped: int = 0,
    series: set[str] | None = None,
) -> Trace:
    """Return the event of one traced step.

    Args:
        result: Result of the trace.
        step: Number of the step; ``None`` if the step did not end.
        skipped: Number of traces that were skipped so far.
        series: Paths of this run's layers that trackers plot as curves over the steps. The function adds the
            largest layers of this trace until there are `MAX_SERIES` paths. Paths are never removed, so each
            curve continues even if another layer is larger in a later trace. ``None``: the run has only this
            trace.
    """
    series = set() if series is None else series
    ranked = sorted(result.layers, key=_rank)
    for layer in ranked[:TOP]:
        if len(series) < MAX_SERIES:
            series.add(layer.path)
    told = ranked[:TOP] + [layer for layer in ranked[TOP:] if layer.path in series]
    held = sum(share.size for share in result.shares if share.path == OUTSIDE_PATH)
    readable = result.peak is not None
    return Trace(
        time_us=now_us(),
        step=step,
        engine=result.engine,
        exact=result.exactness == "exact",
        peak=result.peak,
        at_peak=result.categories,
        layers=tuple(
            _layer(layer, readable=readable, in_series=layer.path in series) for layer in told
        ),
        unattributed=held if result.shares else None,
        truncated=result.truncated,
        duration_us=round(result.duration_ms * 1000),
        skipped=skipped,
        lines=tuple(
            TracedLine(one.line, one.at_peak) for one in result.lines[:TOP_LINES] if one.at_peak
        ),
        device=_device_name(result.device),
    )


def _device_name(device: str) -> str:
    """Return the name of a traced device in events, such as ``cuda0`` for ``cuda:0``."""
    kind, _, index = device.partition(":")
    return "host" if kind == "cpu" else f"{kind}{index or 0}"


def _rank(layer: LayerFigures) -> tuple[int, int, str]:
    return -(layer.at_peak or 0), -(layer.added or 0), layer.path


def _layer(layer: LayerFigures, *, readable: bool, in_series: bool) -> TracedLayer:
    forward = layer.phase("forward")
    nothing = 0 if readable else None
    return TracedLayer(
        path=layer.path,
        at_peak=layer.at_peak,
        peak=layer.peak,
        allocated=layer.allocated,
        kept=forward.kept if forward is not None else nothing,
        added=layer.added,
        in_series=in_series,
    )

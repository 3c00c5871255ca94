"""Trace result as text for a terminal."""

from __future__ import annotations

from collections.abc import Iterator

from memlog._internal.terminal import format_bytes
from memlog.trace.encoding import OUTSIDE_PATH
from memlog.trace.records import TraceResult

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
        result.layers, key=lambda one: (-(one.at_peak or 0), -(one.peak or 0), one.path)
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
    for one in result.lines[:_TOP_LINES]:
        shown = f"  {_cut(one.line, _PATH_WIDTH - 2)}"
        yield f"{shown:<{_PATH_WIDTH}} {format_bytes(one.at_peak):>10} {format_bytes(one.allocated):>10}"


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

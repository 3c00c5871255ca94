"""Drawings in SVG that need no script: lines over steps, stacked bars, the bar of a share."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from xml.etree.ElementTree import Element

from memlog._internal.units import format_bytes
from memlog.reports.page.markup import el
from memlog.reports.page.series import Chart, Curve

_WIDTH, _HEIGHT = 960, 300
_LEFT, _RIGHT, _TOP, _BOTTOM = 78, 34, 14, 30
_SPAN = _HEIGHT - _TOP - _BOTTOM
_MOST = 480
"""Maximum number of points of a drawn line."""
_MOST_BARS = 40
_LABELS = 5
"""Maximum number of labels below the bars on a narrow screen."""
_UNITS = ("B", "KiB", "MiB", "GiB", "TiB", "PiB")
_NEAR = 0.5
"""If memory reaches at least this share of the limit, the chart shows the limit."""

CATEGORIES = (
    "parameters",
    "gradients",
    "optimizer state",
    "activations",
    "recompute",
    "temporaries",
    "inputs",
    "buffers",
    "workspaces",
    "private pools",
    "other",
    "undecided",
    "unsharded parameters",
    "communication",
)
"""Categories in the order in which they are stacked. A category's index is the number of its colour."""


def color(category: str) -> str:
    """Return the CSS class with a category's colour."""
    known = CATEGORIES.index(category) if category in CATEGORIES else CATEGORIES.index("other")
    return f"k{known}"


def line_chart(chart: Chart, axis: str) -> Element:
    drawn = [(number, curve, _points(chart, curve)) for number, curve in enumerate(chart.curves)]
    values = [value for _, _, points in drawn for _, value in points]
    if chart.limit is not None and max(values) >= _NEAR * chart.limit:
        values.append(chart.limit)
    low, high, ticks = _scale(min(values), max(values))
    first, last = chart.x[0], chart.x[-1] + chart.width - 1

    def x(at: float) -> float:
        share = (at - first) / (last - first) if last > first else 0.5
        return _LEFT + share * (_WIDTH - _LEFT - _RIGHT)

    def y(value: float) -> float:
        return _TOP + (high - value) / (high - low) * _SPAN

    parts = [
        *(_level_tick(tick, y(tick)) for tick in ticks),
        *(
            el("text", f"{tick:,}", x=f"{x(tick):.1f}", y=_HEIGHT - 10, class_="tick middle")
            for tick in _whole_ticks(first, last)
        ),
        el("text", axis, x=_WIDTH - _RIGHT, y=_HEIGHT - 4, class_="axis end"),
        *(
            _line([(x(at), y(value)) for at, value in points], curve_class(curve, number))
            for number, curve, points in reversed(drawn)
        ),
    ]
    if chart.limit is not None and chart.limit <= high:
        at = y(chart.limit)
        parts.append(el("line", x1=_LEFT, x2=_WIDTH - _RIGHT, y1=at, y2=at, class_="limit"))
    return el(
        "svg",
        el("title", summary_of(chart, axis)),
        parts,
        viewBox=f"0 0 {_WIDTH} {_HEIGHT}",
        role="img",
        class_="static",
    )


def _line(places: Sequence[tuple[float, float]], kind: str) -> Element:
    """Return a line through points of the drawing; a dot if there is only one point."""
    if len(places) == 1:
        [(x, y)] = places
        return el("circle", cx=f"{x:.1f}", cy=f"{y:.1f}", r=3, class_=f"line {kind}")
    points = " ".join(f"{x:.1f},{y:.1f}" for x, y in places)
    return el("polyline", points=points, class_=f"line {kind}")


def curve_class(curve: Curve, number: int) -> str:
    """Return a line's CSS class: a numbered class for a rank or run, the line's kind for other lines."""
    if curve.label.startswith(("rank ", "run ")):
        return f"n{number % 8}"
    return curve.kind


def summary_of(chart: Chart, axis: str) -> str:
    """Return a chart's content in one sentence, for readers who can't see the chart."""
    known = [
        (at, value) for at, value in zip(chart.x, chart.main.high, strict=True) if value is not None
    ]
    (first, begun), (last, ended) = known[0], known[-1]
    at, most = max(known, key=lambda point: point[1])
    return (
        f"{chart.title}, {chart.main.label}: {format_bytes(begun)} at {axis} {first:,}, "
        f"{format_bytes(ended)} at {axis} {last:,}, highest {format_bytes(most)} at {axis} {at:,}"
    )


def stacked_bars(bars: Sequence[tuple[str, Mapping[str, int]]], caption: str) -> Element:
    """Return stacked bars. Each bar has a label and sizes in bytes by category."""
    bars = _chosen(bars)
    most = max(sum(sizes.values()) for _, sizes in bars)
    _, high, ticks = _scale(0, most)
    slot = (_WIDTH - _LEFT - _RIGHT) / len(bars)
    width = min(slot * 0.72, 90)
    every = max(1, -(-len(bars) // _LABELS))
    drawn: list[Element] = []
    for number, (label, sizes) in enumerate(bars):
        middle = _LEFT + (number + 0.5) * slot
        drawn.extend(_stack(label, sizes, middle, width, high))
        kind = "tick middle odd" if number % every else "tick middle"
        drawn.append(el("text", label, x=f"{middle:.1f}", y=_HEIGHT - 8, class_=kind))
    return el(
        "svg",
        el("title", caption),
        (_level_tick(tick, _HEIGHT - _BOTTOM - tick / high * _SPAN) for tick in ticks),
        drawn,
        viewBox=f"0 0 {_WIDTH} {_HEIGHT}",
        role="img",
        class_="bars",
    )


def _stack(
    label: str, sizes: Mapping[str, int], middle: float, width: float, high: float
) -> Iterator[Element]:
    """Yield the parts of one bar, from the bottom up; ``high``: bytes at the top of the scale."""
    top = float(_HEIGHT - _BOTTOM)
    for category in sorted(sizes, key=_stacking):
        height = sizes[category] / high * _SPAN
        top -= height
        yield el(
            "rect",
            el("title", f"{label}: {category} {format_bytes(sizes[category])}"),
            x=f"{middle - width / 2:.1f}",
            y=f"{top:.2f}",
            width=f"{width:.1f}",
            height=f"{height:.2f}",
            class_=f"bar {color(category)}",
        )


def legend(categories: Iterable[str]) -> Element:
    """Return the colours of categories, in the order in which they are stacked."""
    return swatches((color(name), name) for name in sorted(categories, key=_stacking))


def swatches(entries: Iterable[tuple[str, str]]) -> Element:
    """Return a list of labels, each with the colour of its CSS class."""
    items = (el("li", el("span", class_=f"swatch {color}"), label) for color, label in entries)
    return el("ul", items, class_="legend")


def share_bar(share: float, classes: str = "") -> Element:
    """Return a bar for a share from 0 to 1, as a picture beside the number."""
    width = f"{min(max(share, 0.0), 1.0) * 100:.1f}"
    return el(
        "svg",
        el("rect", width=100, height=8, rx=2, class_="track"),
        el("rect", width=width, height=8, rx=2, class_=f"fill {classes}"),
        viewBox="0 0 100 8",
        preserveAspectRatio="none",
        class_="share",
        aria_hidden="true",
    )


def _stacking(category: str) -> int:
    return CATEGORIES.index(category) if category in CATEGORIES else len(CATEGORIES)


def _chosen(
    bars: Sequence[tuple[str, Mapping[str, int]]],
) -> Sequence[tuple[str, Mapping[str, int]]]:
    """Return at most `_MOST_BARS` of the bars: evenly spaced ones and the highest one."""
    if len(bars) <= _MOST_BARS:
        return bars
    highest = max(range(len(bars)), key=lambda at: sum(bars[at][1].values()))
    last = len(bars) - 1
    chosen = {round(at * last / (_MOST_BARS - 2)) for at in range(_MOST_BARS - 1)} | {highest}
    return [bars[at] for at in sorted(chosen)]


def _points(chart: Chart, curve: Curve) -> list[tuple[int, int]]:
    """Return at most `_MOST` points of a line. Each of them is the highest of several successive points."""
    known = [
        (at, value) for at, value in zip(chart.x, curve.high, strict=True) if value is not None
    ]
    size = math.ceil(len(known) / _MOST)
    pieces = (known[at : at + size] for at in range(0, len(known), max(size, 1)))
    return [max(piece, key=lambda point: point[1]) for piece in pieces]


def _scale(low: float, high: float) -> tuple[float, float, list[float]]:
    """Return the lower end, the upper end and the ticks of a scale of bytes.

    The distance of the ticks is a power of two. The scale begins at 0 if ``low`` is below half of ``high``.
    """
    high = max(high, 0.0)  # a damaged journal may have negative sizes
    low = max(low, 0.0) if low >= 0.5 * high else 0.0
    span = max(high - low, 4096.0)
    apart = 2.0 ** math.ceil(math.log2(span / 5))
    bottom, top = math.floor(low / apart) * apart, math.ceil((high + span * 0.02) / apart) * apart
    ticks = [bottom + number * apart for number in range(round((top - bottom) / apart) + 1)]
    return bottom, top, ticks


def _whole_ticks(first: int, last: int) -> Iterator[int]:
    apart = max(1, last - first) / 6
    scale = 10 ** math.floor(math.log10(apart)) if apart >= 1 else 1
    step = next(int(scale * f) for f in (1, 2, 5, 10) if scale * f >= apart or f == 10)  # noqa: PLR2004
    return iter(range(-(-first // step) * step, last + 1, step))


def _level_tick(value: float, y: float) -> Element:
    return el(
        "g",
        el("line", x1=_LEFT, x2=_WIDTH - _RIGHT, y1=f"{y:.1f}", y2=f"{y:.1f}", class_="grid"),
        el("text", _short(value), x=_LEFT - 8, y=f"{y + 4:.1f}", class_="tick end"),
    )


def _short(value: float) -> str:
    """Return a tick's size with its unit, without rounding."""
    scaled, unit = value, 0
    while abs(scaled) >= 1024 and unit < len(_UNITS) - 1:  # noqa: PLR2004
        scaled, unit = scaled / 1024, unit + 1
    return f"{scaled:.3f}".rstrip("0").rstrip(".") + f" {_UNITS[unit]}"

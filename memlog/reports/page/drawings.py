"""HTML as a tree of elements, and drawings in SVG that need no script."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Literal, TypeAlias
from xml.etree.ElementTree import Element, fromstring, tostring

import msgspec
from markdown_it import MarkdownIt

from memlog._internal.terminal import format_bytes

Child: TypeAlias = "Element | str | None"
TableRow: TypeAlias = "Sequence[Child | list[Child]]"
"""Cells of a table's row."""
_HEADINGS = {"h1": "h3", "h2": "h4", "h3": "h5"}
"""New level of each heading of a Markdown text. The page's own headings have the higher levels."""


def el(name: str, /, *children: Child | Iterable[Child], **attributes: object) -> Element:
    """Return an element.

    Args:
        name: Name of the element.
        children: Elements and text, in order; ``None`` is left out.
        attributes: Attributes; ``class_`` is written as ``class``, ``aria_label`` as ``aria-label``. ``None``
            and ``False`` are left out, ``True`` is written as an attribute without a value.
    """
    written = {
        key.rstrip("_").replace("_", "-"): "" if value is True else clean(str(value))
        for key, value in attributes.items()
        if value is not None and value is not False
    }
    made = Element(name, written)
    for child in children:
        if child is None or isinstance(child, (str, Element)):
            _append(made, child)
        else:
            for part in child:
                _append(made, part)
    return made


def prose(text: str) -> list[Child]:
    """Return a text as children of an element. Text between backticks becomes a ``code`` element."""
    parts = text.split("`")
    if len(parts) % 2 == 0:  # an unpaired backtick is text
        return [text]
    return [el("code", part) if at % 2 else part for at, part in enumerate(parts) if part]


def table(
    caption: str,
    headings: Sequence[str],
    rows: Iterable[TableRow],
    *,
    numbers: Sequence[int] = (),
) -> Element:
    """Return a table in a box that scrolls if it is too wide.

    Screen readers read the caption. The first cell of a row is the row's heading. ``numbers`` are the indices
    of the columns that are aligned to the right.
    """

    def kind(at: int) -> str | None:
        return "number" if at in numbers else None

    head = el(
        "tr", [el("th", text, scope="col", class_=kind(at)) for at, text in enumerate(headings)]
    )
    body = [
        el(
            "tr",
            [
                el(
                    "td" if at else "th",
                    cell,
                    scope=None if at else "row",
                    class_=kind(at),
                )
                for at, cell in enumerate(row)
            ],
        )
        for row in rows
    ]
    made = el("table", el("caption", caption), el("thead", head), el("tbody", body))
    return el("div", made, class_="scroll", tabindex="0", role="region", aria_label=caption)


def rendered(text: str) -> Element:
    """Return Markdown as an element. HTML in the text stays text; links and pictures are left out."""
    parser = MarkdownIt("commonmark", {"html": False, "xhtmlOut": True}).enable("table")
    parser.disable(["link", "image", "autolink"])
    # Without control characters, which XML does not allow.
    safe = "".join(char for char in text if char.isprintable() or char == "\n")
    root = fromstring(f'<div class="prose">{parser.render(safe)}</div>')  # noqa: S314 - markdown-it wrote it: no entity
    for element in root.iter():
        element.tag = _HEADINGS.get(element.tag, element.tag)
    return root


def write(root: Element) -> str:
    return "<!doctype html>\n" + tostring(root, encoding="unicode", method="html") + "\n"


def clean(text: str) -> str:
    """Return text with control characters replaced, because text from a journal is untrusted."""
    if text.isprintable():
        return text
    return "".join(
        char if char.isprintable() or char == "\n" else "\N{REPLACEMENT CHARACTER}" for char in text
    )


def _append(parent: Element, child: Child) -> None:
    if child is None:
        return
    if isinstance(child, Element):
        parent.append(child)
        return
    text = clean(child)
    # ElementTree keeps the text after an element in that element's `tail`.
    if len(parent):
        parent[-1].tail = (parent[-1].tail or "") + text
    else:
        parent.text = (parent.text or "") + text


CurveKind: TypeAlias = Literal["level", "peak", "reserved", "tree"]

MOST_POINTS = 2_000
"""Maximum number of intervals of a chart. If there are more, every two neighbours become one interval."""


class Curve(msgspec.Struct, frozen=True):
    """One line of a chart."""

    label: str
    kind: CurveKind
    low: list[int | None] | None
    """Lowest value of each interval; ``None``: each interval has one value, which is in ``high``."""
    high: list[int | None]
    """Highest value of each interval, in bytes; ``None`` if there was no reading."""


class Chart(msgspec.Struct, frozen=True):
    """Chart with lines of one kind of memory."""

    id: str
    """Name of the device; ``host`` for the host, ``ranks`` for the chart that compares ranks."""
    title: str
    x: list[int]
    """First index of each interval; an index is the number of a step, an evaluation or an epoch."""
    width: int
    """Number of steps, evaluations or epochs in an interval."""
    curves: list[Curve]
    limit: int | None
    """Bytes available; ``None``: unknown."""
    peak: tuple[int, int] | None = None
    """Index and bytes of the run's peak; ``None``: unknown, or the peak has no index on this axis."""

    @property
    def main(self) -> Curve:
        """Line of the memory in use. The other lines are shown beside it."""
        return self.curves[0]


class CurveFold:
    """Lowest and highest values of several lines over the same intervals.

    If there are more than ``most`` intervals, every two neighbours become one interval.
    """

    def __init__(self, most: int = MOST_POINTS) -> None:
        self._most = most
        self._width = 1
        self._curves: dict[tuple[str, CurveKind], dict[int, tuple[int, int]]] = {}
        self._intervals: set[int] = set()

    def add(self, label: str, kind: CurveKind, index: int, value: int | None) -> None:
        """Add one value of a line; ``None`` (unknown) is left out."""
        if value is None:
            return
        curve = self._curves.setdefault((label, kind), {})
        at = index // self._width
        known = curve.get(at)
        if known is None:
            curve[at] = (value, value)
            self._intervals.add(at)
            # Once may not be enough: intervals that lie apart have no neighbour to join.
            while len(self._intervals) > self._most:
                self._widen()
        elif not known[0] <= value <= known[1]:
            curve[at] = (min(value, known[0]), max(value, known[1]))

    def _widen(self) -> None:
        self._width *= 2
        self._intervals = {at // 2 for at in self._intervals}
        for key, narrow in self._curves.items():
            wide: dict[int, tuple[int, int]] = {}
            for at, (low, high) in narrow.items():
                known = wide.get(at // 2, (low, high))
                wide[at // 2] = (min(low, known[0]), max(high, known[1]))
            self._curves[key] = wide

    @property
    def is_empty(self) -> bool:
        return not self._curves

    def chart(self, name: str, title: str, limit: int | None) -> Chart:
        intervals = sorted(self._intervals)
        return Chart(
            id=name,
            title=title,
            x=[at * self._width for at in intervals],
            width=self._width,
            curves=[
                Curve(
                    label,
                    kind,
                    None if self._width == 1 else _side(values, intervals, 0),
                    _side(values, intervals, 1),
                )
                for (label, kind), values in self._curves.items()
            ],
            limit=limit,
        )


def _side(
    values: dict[int, tuple[int, int]], intervals: Iterable[int], side: int
) -> list[int | None]:
    return [values[at][side] if at in values else None for at in intervals]


def side_by_side(name: str, title: str, charts: Mapping[str, Chart], limit: int | None) -> Chart:
    """Return one chart with the main line of each chart. The keys of ``charts`` label the lines.

    If a main line has a lowest and a highest value for each interval, the highest is shown.
    """
    width = max(chart.width for chart in charts.values())
    lines = {label: _widened(chart, width) for label, chart in charts.items()}
    x = sorted({at for line in lines.values() for at in line})
    curves = [
        Curve(label, "level", None, [line.get(at) for at in x]) for label, line in lines.items()
    ]
    return Chart(id=name, title=title, x=x, width=width, curves=curves, limit=limit)


def _widened(chart: Chart, width: int) -> dict[int, int]:
    line: dict[int, int] = {}
    for at, value in zip(chart.x, chart.main.high, strict=True):
        if value is not None:
            wide = at // width * width
            line[wide] = max(value, line.get(wide, value))
    return line


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
        # The main line comes last, so that no other line covers it.
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
    # From the first multiple of `step` that is not below `first`.
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

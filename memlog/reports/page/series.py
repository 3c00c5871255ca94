"""Series for charts, in bounded memory: the lowest and the highest value of each of many equal intervals."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Literal, TypeAlias

import msgspec

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

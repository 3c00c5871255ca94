"""Aggregate metrics from a stream of events, in bounded memory."""

from __future__ import annotations

from memlog.events import Event
from memlog.metrics import axis_and_index, values
from memlog.reports.schema import MetricSummary
from memlog.sink import Axis


class MetricFold:
    """First index, last index, last value, minimum and maximum of every metric.

    An index is the number of a step, an evaluation or an epoch.
    """

    def __init__(self) -> None:
        self._series: dict[str, _Series] = {}

    def take(self, event: Event, *, older: bool = False) -> None:
        """Add the metrics of one event. An event without a step, evaluation or epoch has no metrics.

        If ``older`` is True, use an older memlog's names of metrics (see `memlog.metrics.values`).
        """
        on_axis = axis_and_index(event)
        if on_axis is None:
            return
        axis, index = on_axis
        for name, value, _ in values(event, older=older):
            if value is None:
                continue
            series = self._series.get(name)
            if series is None:
                self._series[name] = _Series(axis, value, index, event.time_us)
            else:
                series.take(value, index, event.time_us)

    def summary(self) -> dict[str, MetricSummary]:
        return {name: series.summary() for name, series in sorted(self._series.items())}


class _Series:
    __slots__ = ("_axis", "_first", "_last", "_latest", "_max", "_min")

    def __init__(self, axis: Axis, value: float, index: int, time_us: int) -> None:
        self._axis = axis
        self._first = index
        self._latest = (index, time_us)
        self._last = self._min = self._max = value

    def take(self, value: float, index: int, time_us: int) -> None:
        # Several processes can publish the same metric, and their journals are read one after the other.
        if (index, time_us) >= self._latest:
            self._latest = (index, time_us)
            self._last = value
        elif index < self._first:
            self._first = index
        if value < self._min:
            self._min = value
        elif value > self._max:
            self._max = value

    def summary(self) -> MetricSummary:
        return MetricSummary(
            axis=self._axis,
            first_index=self._first,
            last_index=self._latest[0],
            last=float(self._last),
            min=float(self._min),
            max=float(self._max),
        )

"""Aggregate metrics and peaks of memory from a stream of events, in bounded memory."""

from __future__ import annotations

from typing import Final

from memlog.events import (
    Batch,
    DeviceReading,
    Epoch,
    Evaluation,
    Event,
    PeakSource,
    Phase,
    Recorded,
    Sample,
)
from memlog.metrics import axis_and_index, values
from memlog.reports.schema import MetricSummary, Peak
from memlog.sink import Axis

HOST_RSS: Final = "host.rss"
TREE: Final = "host.tree"
CGROUP: Final = "host.cgroup"
ALLOCATED: Final = ".allocated"
RESERVED: Final = ".reserved"
"""`ALLOCATED` and `RESERVED` are the endings of a device's kinds of memory, as in ``cuda0.reserved``."""

UNKNOWN = Peak(bytes=None, source=None, step=None, evaluation=None)
_TRUST: dict[PeakSource | None, int] = {None: 0, "sampled": 1, "watermark": 2, "exact": 3}
"""Priority of a reading's source. Of equal readings, only the reading with the highest priority is kept."""


def peak_kind(name: str) -> str:
    """Return the kind of memory that is shown as the peak of ``name``, such as ``cuda0.allocated``."""
    return HOST_RSS if name == "host" else name + ALLOCATED


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


class PeakFold:
    """The highest value of each kind of memory, with its source and its step.

    A kind is ``host.rss`` (the process), ``host.tree`` (the process and its descendants), ``host.cgroup``,
    ``<device>.allocated`` or ``<device>.reserved``.
    """

    def __init__(self) -> None:
        self._peaks = {HOST_RSS: UNKNOWN, TREE: UNKNOWN}

    def expect(self, device: str) -> None:
        """Add a device's missing kinds of memory, ``allocated`` and ``reserved``, with unknown peaks."""
        for kind in (device + ALLOCATED, device + RESERVED):
            self._peaks.setdefault(kind, UNKNOWN)

    def take(self, event: Event) -> None:
        """Add one event's readings of memory. `Scope` events are left out: they hold changes only."""
        if isinstance(event, (Batch, Epoch, Phase)):
            found = _highest(event.rss, event.rss_peak, event.rss_peak_source)
            self._offer(HOST_RSS, *found, event.step)
            self._devices(event.devices, event.step, None)
        elif isinstance(event, Sample):
            self._offer(TREE, event.tree_pss, "sampled", event.step)
            self._offer(CGROUP, event.cgroup_used, "sampled", event.step)
        elif isinstance(event, (Evaluation, Recorded)):
            evaluation = event.evaluation if isinstance(event, Evaluation) else None
            step = event.step if isinstance(event, Recorded) else None
            self._offer(HOST_RSS, event.rss, "sampled", step, evaluation)
            self._devices(event.devices, step, evaluation)

    def summary(self) -> dict[str, Peak]:
        return dict(sorted(self._peaks.items()))

    def _devices(
        self, readings: tuple[DeviceReading, ...], step: int | None, evaluation: int | None
    ) -> None:
        for device in readings:
            found = _highest(device.allocated, device.peak, device.peak_source)
            self._offer(device.name + ALLOCATED, *found, step, evaluation)
            self._offer(device.name + RESERVED, device.reserved, "sampled", step, evaluation)

    def _offer(
        self,
        kind: str,
        size: int | None,
        source: PeakSource | None,
        step: int | None,
        evaluation: int | None = None,
    ) -> None:
        """Update the peak of one kind of memory. If sizes are equal, the `_TRUST` of the source decides."""
        if size is None:
            return
        peak = self._peaks.get(kind, UNKNOWN)
        if peak.bytes is None or (size, _TRUST[source]) > (peak.bytes, _TRUST[peak.source]):
            self._peaks[kind] = Peak(bytes=size, source=source, step=step, evaluation=evaluation)


def _highest(
    level: int | None, peak: int | None, source: PeakSource | None
) -> tuple[int | None, PeakSource | None]:
    """Return a reading's peak and the peak's source.

    If the peak is unknown, return the memory in use instead, with the source ``sampled``.
    """
    return (level, "sampled") if peak is None else (peak, source)

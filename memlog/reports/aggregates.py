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
from memlog.metrics import place, values
from memlog.reports.schema import MetricSummary, Peak
from memlog.sink import Axis

MAX_NAMES = 10_000
"""Maximum number of names in a table, because a journal is untrusted. Further names are left out."""

HOST: Final = "host.rss"
TREE: Final = "host.tree"
CGROUP: Final = "host.cgroup"
ALLOCATED: Final = ".allocated"
RESERVED: Final = ".reserved"
"""In the name of a kind of memory, `ALLOCATED` or `RESERVED` comes after the device's name."""

_TRUST: dict[PeakSource | None, int] = {None: 0, "sampled": 1, "watermark": 2, "exact": 3}
"""Rank of a reading's source. Of equal readings the one with the highest rank is kept."""


class MetricFold:
    """First index, last value, minimum and maximum of every metric, on the same axis as in trackers.

    Attributes:
        omitted: Number of values that were left out because the table already had `MAX_NAMES` other metrics.
    """

    def __init__(self) -> None:
        self.omitted = 0
        self._series: dict[str, _Series] = {}

    def take(self, event: Event, *, older: bool = False) -> None:
        """Add the metrics of one event. An event without an axis has no metrics, as in a tracker.

        Args:
            event: The event.
            older: As in `memlog.metrics.values`.
        """
        placed = place(event)
        if placed is None:
            return
        axis, index = placed
        for name, value, _ in values(event, older=older):
            if value is None:
                continue
            series = self._series.get(name)
            if series is not None:
                series.take(value, index, event.time_us)
            elif len(self._series) < MAX_NAMES:
                self._series[name] = _Series(axis, value, index, event.time_us)
            else:
                self.omitted += 1

    def summary(self) -> dict[str, MetricSummary]:
        """Return every metric that had a value, by name."""
        return {name: series.summary() for name, series in sorted(self._series.items())}


class _Series:
    """Aggregates of one metric."""

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

    Attributes:
        omitted: Number of readings that were left out because the table already had `MAX_NAMES` other kinds.
    """

    def __init__(self) -> None:
        self.omitted = 0
        self._peaks = {HOST: _UNKNOWN, TREE: _UNKNOWN}

    def expect(self, device: str) -> None:
        """Add a device's two kinds of memory. If no reading follows, they are unknown instead of missing."""
        for kind in (device + ALLOCATED, device + RESERVED):
            if len(self._peaks) < MAX_NAMES:
                self._peaks.setdefault(kind, _UNKNOWN)

    def take(self, event: Event) -> None:
        """Add one event's readings of memory. Scopes are left out, because their sizes are changes."""
        if isinstance(event, (Batch, Epoch)):
            self._host(event)
            self._devices(event.devices, event.step, None)
        elif isinstance(event, Sample):
            self._offer(TREE, event.tree_pss, "sampled", event.step)
            self._offer(CGROUP, event.cgroup_used, "sampled", event.step)
        elif isinstance(event, (Evaluation, Recorded)):
            evaluation = event.evaluation if isinstance(event, Evaluation) else None
            step = event.step if isinstance(event, Recorded) else None
            self._offer(HOST, event.rss, "sampled", step, evaluation)
            self._devices(event.devices, step, evaluation)
        elif isinstance(event, Phase):
            self._host(event)
            self._devices(event.devices, event.step, None)

    def summary(self) -> dict[str, Peak]:
        """Return the peaks of all kinds, by name."""
        return dict(sorted(self._peaks.items()))

    def _host(self, event: Batch | Epoch | Phase) -> None:
        if event.rss_peak is None:
            self._offer(HOST, event.rss, "sampled", event.step)
        else:
            self._offer(HOST, event.rss_peak, event.rss_peak_source, event.step)

    def _devices(
        self, readings: tuple[DeviceReading, ...], step: int | None, evaluation: int | None
    ) -> None:
        for device in readings:
            kind = device.name + ALLOCATED
            if device.peak is None:
                self._offer(kind, device.allocated, "sampled", step, evaluation)
            else:
                self._offer(kind, device.peak, device.peak_source, step, evaluation)
            self._offer(device.name + RESERVED, device.reserved, "sampled", step, evaluation)

    def _offer(
        self,
        kind: str,
        size: int | None,
        source: PeakSource | None,
        step: int | None,
        evaluation: int | None = None,
    ) -> None:
        """Keep the largest value. Of equal values, keep the one with the best source, or else the first."""
        if size is None:
            return
        peak = self._peaks.get(kind)
        if peak is None:
            if len(self._peaks) >= MAX_NAMES:
                self.omitted += 1
                return
        elif peak.bytes is not None and (
            size < peak.bytes or (size == peak.bytes and _TRUST[source] <= _TRUST[peak.source])
        ):
            return
        self._peaks[kind] = Peak(bytes=size, source=source, step=step, evaluation=evaluation)


_UNKNOWN = Peak(bytes=None, source=None, step=None, evaluation=None)

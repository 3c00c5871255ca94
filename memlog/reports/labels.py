"""Folding what the user watched by hand into facts by label: blocks, functions, points."""

from __future__ import annotations

from memlog.events import DeviceReading, PeakSource, Recorded, Scope
from memlog.reports.schema import Levels, PointFacts, ScopeDevice, ScopeFacts

MAX_LABELS = 200
"""Labels of each kind that are kept at most; the first ones."""
_MAX_DEVICES = 64


class LabelFold:
    """Counts, last and largest values by label.

    Attributes:
        omitted_scopes: Blocks of labels beyond the first `MAX_LABELS`.
        omitted_points: Points likewise.
    """

    def __init__(self) -> None:
        self.omitted_scopes = self.omitted_points = 0
        self._scopes: dict[str, _Scopes] = {}
        self._points: dict[str, _Points] = {}

    def take_scope(self, event: Scope) -> None:
        """A block or a call is over."""
        held = self._scopes.get(event.label)
        if held is None:
            if len(self._scopes) >= MAX_LABELS:
                self.omitted_scopes += 1
                return
            held = self._scopes[event.label] = _Scopes()
        held.take(event)

    def take_point(self, event: Recorded) -> None:
        """A point was recorded."""
        held = self._points.get(event.label)
        if held is None:
            if len(self._points) >= MAX_LABELS:
                self.omitted_points += 1
                return
            held = self._points[event.label] = _Points()
        held.take(event)

    def scopes(self) -> dict[str, ScopeFacts]:
        """Every label's blocks, in the order in which the labels came."""
        return {label: held.facts() for label, held in self._scopes.items()}

    def points(self) -> dict[str, PointFacts]:
        """Every label's points, likewise."""
        return {label: held.facts() for label, held in self._points.items()}


class _Levels:
    """The last and the largest of some values; what is unknown is passed over."""

    def __init__(self) -> None:
        self.last: int | None = None
        self.largest: int | None = None

    def take(self, size: int | None) -> None:
        if size is not None:
            self.last = size
            self.largest = size if self.largest is None else max(size, self.largest)

    def levels(self) -> Levels:
        return Levels(last_bytes=self.last, largest_bytes=self.largest)


class _Device:
    """Blocks of one label on one accelerator."""

    def __init__(self) -> None:
        self.change = _Levels()
        self.peak: int | None = None
        self.source: PeakSource | None = None

    def take(self, reading: DeviceReading) -> None:
        self.change.take(reading.allocated)
        if reading.peak is not None and (self.peak is None or reading.peak > self.peak):
            self.peak, self.source = reading.peak, reading.peak_source


class _Scopes:
    """The blocks of one label."""

    def __init__(self) -> None:
        self._count = self._errors = self._duration_us = 0
        self._rss = _Levels()
        self._devices: dict[str, _Device] = {}

    def take(self, event: Scope) -> None:
        self._count += 1
        self._errors += event.error is not None
        self._duration_us += event.duration_us
        self._rss.take(event.rss_change)
        for reading in event.devices:
            if reading.name in self._devices or len(self._devices) < _MAX_DEVICES:
                self._devices.setdefault(reading.name, _Device()).take(reading)

    def facts(self) -> ScopeFacts:
        return ScopeFacts(
            count=self._count,
            errors=self._errors,
            duration_s=self._duration_us / 1e6,
            rss_change=self._rss.levels(),
            devices={
                name: ScopeDevice(
                    allocated_change=device.change.levels(),
                    peak_bytes=device.peak,
                    peak_source=device.source,
                )
                for name, device in self._devices.items()
            },
        )


class _Points:
    """The points of one label."""

    def __init__(self) -> None:
        self._count = 0
        self._rss = _Levels()
        self._allocated: dict[str, _Levels] = {}

    def take(self, event: Recorded) -> None:
        self._count += 1
        self._rss.take(event.rss)
        for reading in event.devices:
            if reading.name in self._allocated or len(self._allocated) < _MAX_DEVICES:
                self._allocated.setdefault(reading.name, _Levels()).take(reading.allocated)

    def facts(self) -> PointFacts:
        return PointFacts(
            count=self._count,
            rss=self._rss.levels(),
            allocated={name: levels.levels() for name, levels in self._allocated.items()},
        )

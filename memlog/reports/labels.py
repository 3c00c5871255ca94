"""Collect facts, by label, about the blocks, functions and points that the user's program marked."""

from __future__ import annotations

from memlog.events import PeakSource, Reading, Recorded, Scope, changes, main_readings
from memlog.reports.schema import Levels, PointFacts, ScopeDevice, ScopeFacts

MAX_LABELS = 200
"""Maximum number of labels of each kind; the first ones are kept."""


class LabelFold:
    """Number of blocks and points, and their last and largest values, by label."""

    def __init__(self) -> None:
        self.omitted_scopes = self.omitted_points = 0
        """Numbers of blocks and of points whose labels are beyond the first `MAX_LABELS`."""
        self._scopes: dict[str, _Scopes] = {}
        self._points: dict[str, _Points] = {}

    def take_scope(self, event: Scope) -> None:
        if event.label not in self._scopes and len(self._scopes) >= MAX_LABELS:
            self.omitted_scopes += 1
        else:
            self._scopes.setdefault(event.label, _Scopes()).take(event)

    def take_point(self, event: Recorded) -> None:
        if event.label not in self._points and len(self._points) >= MAX_LABELS:
            self.omitted_points += 1
        else:
            self._points.setdefault(event.label, _Points()).take(event)

    def scopes(self) -> dict[str, ScopeFacts]:
        """Return the blocks by label, in the order in which the labels first appeared."""
        return {label: scopes.facts() for label, scopes in self._scopes.items()}

    def points(self) -> dict[str, PointFacts]:
        """Return the points by label, in the order in which the labels first appeared."""
        return {label: points.facts() for label, points in self._points.items()}


class _Levels:
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
    def __init__(self) -> None:
        self.change = _Levels()
        self.peak: int | None = None
        self.source: PeakSource | None = None

    def take(self, reading: Reading) -> None:
        self.change.take(reading.level)
        if reading.peak is not None and (self.peak is None or reading.peak > self.peak):
            self.peak, self.source = reading.peak, reading.source


class _Scopes:
    def __init__(self) -> None:
        self._count = self._errors = self._duration_us = 0
        self._rss = _Levels()
        self._devices: dict[str, _Device] = {}

    def take(self, event: Scope) -> None:
        self._count += 1
        self._errors += event.error is not None
        self._duration_us += event.duration_us
        host, *devices = changes(event)
        self._rss.take(host.level)
        for each in devices:
            self._devices.setdefault(each.owner, _Device()).take(each)

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
    def __init__(self) -> None:
        self._count = 0
        self._rss = _Levels()
        self._allocated: dict[str, _Levels] = {}

    def take(self, event: Recorded) -> None:
        self._count += 1
        host, *devices = main_readings(event)
        self._rss.take(host.level)
        for each in devices:
            self._allocated.setdefault(each.owner, _Levels()).take(each.level)

    def facts(self) -> PointFacts:
        return PointFacts(
            count=self._count,
            rss=self._rss.levels(),
            allocated={name: levels.levels() for name, levels in self._allocated.items()},
        )

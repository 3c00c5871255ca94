"""Accelerators that the run uses, detected while it runs."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from typing import Any

from memlog._internal.diagnostics import Diagnostics
from memlog.events import Device, DeviceReading, now_us
from memlog.probes._backends import (
    DEVICE_SCAN_S,
    AcceleratorBackend,
    CudaBackend,
    Description,
    DeviceFigures,
    MpsBackend,
    OtherBackend,
    XpuBackend,
)
from memlog.probes.peaks import PeakWindow


class AcceleratorProbe:
    """Reader of the allocators of all devices in use. One reading queries each device's allocator one time.

    The probe never imports torch. It never initialises a device, waits for a device, or resets a device's
    statistics. Each probe measures peaks since its own previous reading. So a caller that needs the peaks of
    both epochs and batches uses two probes. Errors are counted in ``diagnostics`` and never raised.
    """

    def __init__(
        self, diagnostics: Diagnostics, *, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._diagnostics = diagnostics
        self._mps = MpsBackend()
        self._clock = clock
        self._new: list[tuple[_DevicesOfAKind, int]] = []
        self._kinds: tuple[_DevicesOfAKind, ...] | None = None

    def notice(self, device_type: str) -> None:
        """Report the device of one of the run's tensors (``tensor.device.type``).

        Only ``mps`` needs this report, because querying the memory of an unused ``mps`` would initialise it.
        """
        if device_type == self._mps.kind:
            self._mps.noticed = True

    def read(self) -> tuple[DeviceReading, ...]:
        """Return a reading of each device in use; ``()`` if no device is in use.

        ``peak_source`` says whether the peak since the last call is exact or a bound (see `PeakWindow`).
        """
        torch = sys.modules.get("torch")
        if torch is None:
            return ()
        if self._kinds is None:
            self._kinds = tuple(self._possible_kinds(torch))
        readings: list[DeviceReading] = []
        for devices in self._kinds:
            try:
                if devices.backend.ready(torch):
                    readings += devices.read(torch)
            except Exception as error:  # noqa: BLE001, PERF203 - an error of one kind must not affect others
                self._diagnostics.fault(f"looking for {devices.backend.kind} devices", error)
        return tuple(readings)

    def _possible_kinds(self, torch: Any) -> Iterator[_DevicesOfAKind]:
        backends = (CudaBackend(), XpuBackend(), self._mps, OtherBackend(self._clock))
        for backend in backends:
            with self._diagnostics.contained(f"looking for {backend.kind} devices"):
                if backend.possible(torch):
                    yield _DevicesOfAKind(backend, self._diagnostics, self._clock, self._new)

    def new_devices(self) -> tuple[Device, ...]:
        """Return the devices whose first reading came after the last call of this method."""
        if not self._new:
            return ()
        found = tuple(self._new)
        self._new.clear()
        torch = sys.modules.get("torch")
        return tuple(devices.describe(torch, index) for devices, index in found)


@dataclass(eq=False)
class _DevicesOfAKind:
    """Devices of one backend. Each reading includes every device that the run has used so far."""

    backend: AcceleratorBackend
    _diagnostics: Diagnostics
    _clock: Callable[[], float]
    _new: list[tuple[_DevicesOfAKind, int]]
    """Devices read for the first time since the last call of `AcceleratorProbe.new_devices`.

    Each is a tuple: the object for the device's kind, and the device's index."""
    _next_scan: float = field(default=float("-inf"), init=False)
    _windows: dict[int, PeakWindow] = field(default_factory=dict, init=False)

    def read(self, torch: Any) -> list[DeviceReading]:
        readings = []
        for index in self._candidates(torch):
            figures = self._figures(torch, index)
            if index in self._windows or figures is None or figures.in_use:
                readings.append(self._reading(index, figures or DeviceFigures()))
        return readings

    def describe(self, torch: Any, index: int) -> Device:
        name, description = self._name(index), Description()
        with self._diagnostics.contained(f"describing {name}"):
            description = self.backend.describe(torch, index)
        return Device(now_us(), name, *description)

    def _candidates(self, torch: Any) -> Iterable[int]:
        """Return the devices to read.

        Every few seconds, return all devices. Otherwise return the devices in use and torch's current
        device, because the current device can come into use next.
        """
        now = self._clock()
        if now < self._next_scan:
            return sorted({*self._windows, self.backend.current(torch)})
        self._next_scan = now + DEVICE_SCAN_S
        return range(self.backend.count(torch))

    def _figures(self, torch: Any, index: int) -> DeviceFigures | None:
        """Return the device's figures; ``None`` if reading failed.

        A failed reading does not show whether the device is in use.
        """
        try:
            return self.backend.figures(torch, index)
        except Exception as error:  # noqa: BLE001 - an unreadable number must not end training
            self._diagnostics.fault(f"reading the memory of {self._name(index)}", error)
            return None

    def _reading(self, index: int, figures: DeviceFigures) -> DeviceReading:
        if index not in self._windows:
            self._windows[index] = PeakWindow()
            self._new.append((self, index))
        peak, source = self._windows[index].advance(figures.allocated, figures.peak)
        return DeviceReading(
            name=self._name(index),
            allocated=figures.allocated,
            reserved=figures.reserved,
            peak=peak,
            peak_source=source,
            inactive_split=figures.inactive_split,
        )

    def _name(self, index: int) -> str:
        return f"{self.backend.kind}{index}"

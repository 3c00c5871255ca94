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
    NO_FIGURES,
    AcceleratorBackend,
    CudaBackend,
    Description,
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
        self._other: OtherBackend | None = None
        """The backend to ask from time to time, if torch was built for no other kind of device."""

    def idle_ns(self) -> int:
        """Return the nanoseconds for which `read` returns ``()`` again, if its last result was ``()``."""
        if self._kinds is None or self._mps.noticed:
            return 0
        if not self._kinds:
            return int(DEVICE_SCAN_S * 1e9)
        return 0 if self._other is None else self._other.idle_ns()

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
            backends = [devices.backend for devices in self._kinds]
            if len(backends) == 1 and isinstance(backends[0], OtherBackend):
                self._other = backends[0]
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
    _used: dict[int, tuple[str, PeakWindow]] = field(default_factory=dict, init=False)
    """Name and window of each device that the run has used so far, by index, in the order of the indices."""

    def read(self, torch: Any) -> list[DeviceReading]:
        used, readings = self._used, []
        for index in self._candidates(torch):
            try:
                figures = self.backend.figures(torch, index)
            except Exception as error:  # noqa: BLE001 - an unreadable number must not end training
                self._diagnostics.fault(f"reading the memory of {self._name(index)}", error)
                figures = NO_FIGURES
            known = used.get(index)
            if known is None:
                # A failed reading does not show whether the device is in use.
                if figures is not NO_FIGURES and not figures.in_use:
                    continue
                known = self._name(index), PeakWindow()
                self._used = dict(sorted({**self._used, index: known}.items()))
                self._new.append((self, index))
            name, window = known
            allocated, reserved, mark, *others = figures
            peak, source = window.advance(allocated, mark)
            # By position: names would take half a microsecond more.
            readings.append(DeviceReading(name, allocated, reserved, peak, source, *others))
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
        if now >= self._next_scan:
            self._next_scan = now + DEVICE_SCAN_S
            return range(self.backend.count(torch))
        current = self.backend.current(torch)
        return self._used if current in self._used else sorted({*self._used, current})

    def _name(self, index: int) -> str:
        return f"{self.backend.kind}{index}"

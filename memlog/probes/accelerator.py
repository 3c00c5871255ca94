"""Accelerators that the run uses, detected while it runs. Each kind is read through its own part of torch.

torch is passed as an argument, because memlog never imports torch. Nothing here initialises a device, waits
for a device or resets a statistic.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from memlog._internal.diagnostics import Diagnostics
from memlog.events import Device, DeviceReading, now_us
from memlog.probes.machine import shares_host
from memlog.probes.process import PeakWindow, allocator_settings, has_expandable_segments
from memlog.torchside.loaded import statistics_of


class DeviceFigures(NamedTuple):
    """Statistics of one device's allocator, in bytes or counts; ``None`` if unknown.

    `memlog.events.DeviceReading` explains the last three.
    """

    allocated: int | None = None
    reserved: int | None = None
    peak: int | None = None
    """Highest ``allocated`` since the process began, or since other code last reset this statistic."""
    inactive_split: int | None = None
    private_pools: int | None = None
    retries: int | None = None
    ooms: int | None = None

    @property
    def in_use(self) -> bool:
        return bool(self.reserved or self.allocated)


NO_FIGURES = DeviceFigures()
"""Figures of a device that can't be read."""


class Description(NamedTuple):
    """Product name of a device, its capacity in bytes, its UUID, and the settings of its allocator."""

    product: str | None = None
    capacity: int | None = None
    uuid: str | None = None
    allocator: str | None = None
    shares_host: bool = False
    """True if the device has no memory of its own, but uses the host's."""


DEVICE_SCAN_S = 5.0
"""Seconds between checks of devices that were not in use so far."""


_NOTHING: Mapping[str, Mapping[str, int]] = {"all": {}}


def parse_nested(stats: Mapping[Any, Any], *, has_splits: bool = True) -> DeviceFigures:
    """Convert the allocator's internal form, ``{"allocated_bytes": {"all": {"current": …}}}``.

    If ``has_splits`` is false, the allocator does not count the ``inactive_split_bytes``.
    """
    get = stats.get
    allocated = get("allocated_bytes", _NOTHING)["all"]
    splits = get("inactive_split_bytes", _NOTHING)["all"] if has_splits else {}
    figures = (
        allocated.get("current"),
        get("reserved_bytes", _NOTHING)["all"].get("current"),
        allocated.get("peak"),
        splits.get("current"),
        _sum_of_pools(stats),
        get("num_alloc_retries"),
        get("num_ooms"),
    )
    return tuple.__new__(DeviceFigures, figures)  # half the time of DeviceFigures(…)


def _sum_of_pools(stats: Mapping[Any, Any]) -> int | None:
    """Return the bytes reserved in private pools; ``None`` if this version of torch does not count them."""
    pools = stats.get("reserved_bytes_by_private_pools")
    if not pools:  # most steps: a generator would take half a microsecond
        return None if pools is None else 0
    reserved: int = sum(pool["all"]["current"] for pool in pools.values())
    return reserved


def parse_flat(stats: Mapping[str, Any]) -> DeviceFigures:
    """Convert the form of the public ``memory_stats``, ``{"allocated_bytes.all.current": …}``."""
    return DeviceFigures(
        allocated=stats.get("allocated_bytes.all.current"),
        reserved=stats.get("reserved_bytes.all.current"),
        peak=stats.get("allocated_bytes.all.peak"),
        inactive_split=stats.get("inactive_split_bytes.all.current"),
        retries=stats.get("num_alloc_retries"),
        ooms=stats.get("num_ooms"),
    )


class AcceleratorBackend:
    """One kind of accelerator, read through torch's module of the same name, such as ``torch.cuda``.

    Every method can raise any exception that torch raises.
    """

    kind: str
    """Name in front of a device's index, as in ``cuda0``."""
    _nested: Callable[[int], Mapping[Any, Any]] | None = None
    """Private function of torch that returns a device's statistics; ``None``: not known, or there is none."""
    _has_splits = True

    def possible(self, torch: Any, /) -> bool:
        """Return True if torch was built for this kind. The answer never changes."""
        compiled = getattr(getattr(torch, self.kind), "_is_compiled", None)
        return compiled is None or bool(compiled())

    def ready(self, torch: Any, /) -> bool:
        """Return True if the program has initialised this kind of accelerator.

        The method must be fast, because it is called at every reading.
        """
        return bool(getattr(torch, self.kind).is_initialized())

    # The methods below are called only after `ready` returned True.

    def count(self, torch: Any, /) -> int:
        return int(getattr(torch, self.kind).device_count())

    def current(self, torch: Any, /) -> int:
        return int(getattr(torch, self.kind).current_device())

    def figures(self, torch: Any, index: int, /) -> DeviceFigures:
        """Read one device's statistics with a single call of torch."""
        if self._nested is None:
            self._nested = statistics_of(torch, self.kind)
        if self._nested is None:
            flat = parse_flat(getattr(torch, self.kind).memory_stats(index))
            return flat if self._has_splits else flat._replace(inactive_split=None)
        return parse_nested(self._nested(index), has_splits=self._has_splits)

    def describe(self, torch: Any, index: int, /) -> Description:
        """Return the product name, capacity and UUID of a device or of a MIG instance."""
        properties = getattr(torch, self.kind).get_device_properties(index)
        uuid = getattr(properties, "uuid", None)
        return Description(
            properties.name, properties.total_memory, None if uuid is None else str(uuid)
        )


class CudaBackend(AcceleratorBackend):
    """GPUs of Nvidia and of AMD. torch calls both ``cuda``."""

    kind = "cuda"

    def count(self, torch: Any) -> int:
        # With the devices, because a program rarely changes the allocator's settings: they take 1 µs.
        self._has_splits = _counts_splits(torch)
        return super().count(torch)

    def describe(self, torch: Any, index: int) -> Description:
        return (
            super()
            .describe(torch, index)
            ._replace(
                allocator=allocator_settings(torch),
                shares_host=shares_host(torch, self.kind, index),
            )
        )


def _counts_splits(torch: Any) -> bool:
    """Return False if ``inactive_split_bytes`` is always zero. A zero then means "unknown".

    ``cudaMallocAsync`` leaves this statistic at zero. The native allocator doesn't count expandable segments
    (c10/cuda/CUDACachingAllocator.cpp).
    """
    return torch.cuda.get_allocator_backend() == "native" and not has_expandable_segments(
        allocator_settings(torch)
    )


class XpuBackend(AcceleratorBackend):
    """Intel's GPUs, without ``inactive_split``."""

    kind = "xpu"


class MpsBackend(AcceleratorBackend):
    """Apple's GPU, without ``peak`` and ``inactive_split``.

    ``torch.accelerator.memory_*`` fails an assertion on this device. Every query of the device's memory
    initialises the device. torch can't tell whether the device is initialised. So memlog queries the device
    only after a caller has seen a tensor on the device and has set `noticed`.
    """

    kind = "mps"

    def __init__(self) -> None:
        self.noticed = False

    def possible(self, torch: Any) -> bool:
        return bool(torch.backends.mps.is_built())

    def ready(self, _torch: Any) -> bool:
        return self.noticed

    def count(self, _torch: Any) -> int:
        return 1

    def current(self, _torch: Any) -> int:
        return 0

    def figures(self, torch: Any, _index: int) -> DeviceFigures:
        return DeviceFigures(
            allocated=torch.mps.current_allocated_memory(),
            reserved=torch.mps.driver_allocated_memory(),
        )

    def describe(self, torch: Any, _index: int) -> Description:
        get_name = getattr(torch.backends.mps, "get_name", None)
        product = None if get_name is None else get_name()
        return Description(product, torch.mps.recommended_max_memory(), shares_host=True)


class OtherBackend(AcceleratorBackend):
    """Any other device that ``torch.accelerator`` supports: Gaudi, Ascend, MTIA and the like."""

    kind = "accelerator"

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        self._ask_again = float("-inf")
        self._found = False

    def possible(self, torch: Any) -> bool:
        return hasattr(torch.accelerator, "memory_stats") and not _has_own_backend(torch)

    def ready(self, torch: Any) -> bool:
        if not self._found and not self._look(torch):
            return False
        return bool(getattr(torch, self.kind).is_initialized())

    def idle_ns(self) -> int:
        """Return the nanoseconds until `ready` looks for a device again; 0 if there is one."""
        return 0 if self._found else max(int((self._ask_again - self._clock()) * 1e9), 0)

    def _look(self, torch: Any) -> bool:
        """Return True and set `kind` if ``torch.accelerator`` has a device by now.

        Check at most every `DEVICE_SCAN_S` seconds; between checks, return False.

        The check is repeated, because the device's package can be imported later.
        """
        now = self._clock()
        if now < self._ask_again:
            return False
        self._ask_again = now + DEVICE_SCAN_S
        device = torch.accelerator.current_accelerator()
        if device is not None:
            self.kind, self._found = device.type, True
        return self._found

    def count(self, torch: Any) -> int:
        return int(torch.accelerator.device_count())

    def current(self, torch: Any) -> int:
        return int(torch.accelerator.current_device_index())

    def figures(self, torch: Any, index: int) -> DeviceFigures:
        return parse_flat(torch.accelerator.memory_stats(index))

    def describe(self, torch: Any, index: int) -> Description:
        get_memory_info = getattr(torch.accelerator, "get_memory_info", None)
        return Description(None, None if get_memory_info is None else get_memory_info(index)[1])


def _has_own_backend(torch: Any) -> bool:
    """Return True if one of the classes above reads the devices of this build of torch.

    In such a build, memlog does not call ``torch.accelerator.current_accelerator``. The call would find no
    other device. In older versions of torch, the call also queries the driver. Afterwards, forked children
    can't use the device.
    """
    version = torch.version
    built_for = version.cuda or version.hip or getattr(version, "xpu", None)
    return bool(built_for or torch.backends.mps.is_built())


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

"""Kinds of accelerators, each read through its own part of torch.

torch is passed as an argument, because memlog never imports torch. Nothing here initialises a device, waits
for a device or resets a statistic.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, NamedTuple


class DeviceFigures(NamedTuple):
    """Statistics of one device's allocator, in bytes; ``None`` if unknown."""

    allocated: int | None = None
    reserved: int | None = None
    peak: int | None = None
    """Highest ``allocated`` since the process began, or since other code last reset this statistic."""
    inactive_split: int | None = None

    @property
    def in_use(self) -> bool:
        return bool(self.reserved or self.allocated)


class Description(NamedTuple):
    """Product name of a device, its capacity in bytes, and its UUID."""

    product: str | None = None
    capacity: int | None = None
    uuid: str | None = None


DEVICE_SCAN_S = 5.0
"""Seconds between checks of devices that were not in use so far."""


def parse_nested(stats: Mapping[Any, Any]) -> DeviceFigures:
    """Convert the allocator's internal form, ``{"allocated_bytes": {"all": {"current": …}}}``."""

    def value(name: str, measure: str) -> int | None:
        found: int | None = stats.get(name, {}).get("all", {}).get(measure)
        return found

    return DeviceFigures(
        allocated=value("allocated_bytes", "current"),
        reserved=value("reserved_bytes", "current"),
        peak=value("allocated_bytes", "peak"),
        inactive_split=value("inactive_split_bytes", "current"),
    )


def parse_flat(stats: Mapping[str, Any]) -> DeviceFigures:
    """Convert the form of the public ``memory_stats``, ``{"allocated_bytes.all.current": …}``."""
    return DeviceFigures(
        allocated=stats.get("allocated_bytes.all.current"),
        reserved=stats.get("reserved_bytes.all.current"),
        peak=stats.get("allocated_bytes.all.peak"),
        inactive_split=stats.get("inactive_split_bytes.all.current"),
    )


class AcceleratorBackend:
    """One kind of accelerator, read through torch's module of the same name, such as ``torch.cuda``.

    Every method can raise any exception that torch raises.
    """

    kind: str
    """Name in front of a device's index, as in ``cuda0``."""

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
        # The public `memory_stats` takes 129 µs, because it flattens and sorts about 100 entries. The private
        # function takes 21 µs.
        nested = _private(torch, f"_{self.kind}_memoryStats")
        if nested is not None:
            return parse_nested(nested(index))
        return parse_flat(getattr(torch, self.kind).memory_stats(index))

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

    def figures(self, torch: Any, index: int) -> DeviceFigures:
        figures = super().figures(torch, index)
        return figures if _counts_splits(torch) else figures._replace(inactive_split=None)


def _counts_splits(torch: Any) -> bool:
    """Return False if ``inactive_split_bytes`` is always zero. A zero then means "unknown".

    ``cudaMallocAsync`` leaves this statistic at zero. The native allocator doesn't count expandable segments
    (c10/cuda/CUDACachingAllocator.cpp). Older versions of torch have no function that returns the
    allocator's settings. With those versions, a zero counts as a real value.
    """
    if torch.cuda.get_allocator_backend() != "native":
        return False
    settings = _private(torch, "_accelerator_getAllocatorSettings")
    return settings is None or "expandable_segments:True" not in settings()


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
        return Description(product, torch.mps.recommended_max_memory())


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


def _private(torch: Any, name: str) -> Callable[..., Any] | None:
    """Return a private function of torch; ``None`` if this version lacks it."""
    function: Callable[..., Any] | None = getattr(torch._C, name, None)  # noqa: SLF001 - detected
    return function

"""Kinds of accelerators, each read through its own part of torch.

torch is passed as an argument, because memlog never imports torch. Nothing here initialises a device, waits
for a device or resets a statistic.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

from memlog.probes.cuda_allocator import allocator_settings, has_expandable_segments
from memlog.probes.free_memory import shares_host


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
        # The public `memory_stats` takes 129 µs, because it flattens and sorts about 100 entries. The private
        # function takes 11 µs. torch has no faster one: `_accelerator_getDeviceStats` takes as long, and
        # lacks the private pools.
        if self._nested is None:
            name = f"_{self.kind}_memoryStats"
            self._nested = getattr(torch._C, name, None)  # noqa: SLF001 - some versions lack it
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

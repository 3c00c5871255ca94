"""The kinds of accelerators, each as its own part of torch shows it.

torch comes in as an argument, since memlog never imports it. Nothing here initialises a device,
waits for one or resets a statistic.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, NamedTuple, Protocol


class Figures(NamedTuple):
    """What an allocator says about one device, in bytes; ``None`` where it doesn't say."""

    allocated: int | None = None
    reserved: int | None = None
    peak: int | None = None
    """Highest ``allocated`` since the process began or since somebody reset it."""
    inactive_split: int | None = None

    @property
    def in_use(self) -> bool:
        """Whether the run holds memory there."""
        return bool(self.reserved or self.allocated)


class Description(NamedTuple):
    """What a device is; the capacity in bytes."""

    product: str | None = None
    capacity: int | None = None


LOOK_EVERY_S = 5.0
"""Between looks at devices that were not in use so far."""


class Backend(Protocol):
    """One kind of accelerator. Any of these may raise whatever torch raises."""

    @property
    def kind(self) -> str:
        """The name in front of a device's index, as in ``cuda0``."""

    def possible(self, torch: Any, /) -> bool:
        """Whether torch was built for it, which stays as it is."""

    def ready(self, torch: Any, /) -> bool:
        """Whether the run has initialised it; asked at every reading, so it must be cheap."""

    def count(self, torch: Any, /) -> int:
        """The number of devices; asked only when ready, as is all below."""

    def current(self, torch: Any, /) -> int:
        """The index of the device that is selected."""

    def figures(self, torch: Any, index: int, /) -> Figures:
        """Reads one device's statistics, once."""

    def describe(self, torch: Any, index: int, /) -> Description:
        """Says what a device is."""


def parse_nested(stats: Mapping[Any, Any]) -> Figures:
    """Reads the allocator's own form, ``{"allocated_bytes": {"all": {"current": …}}}``."""

    def value(name: str, measure: str) -> int | None:
        found: int | None = stats.get(name, {}).get("all", {}).get(measure)
        return found

    return Figures(
        allocated=value("allocated_bytes", "current"),
        reserved=value("reserved_bytes", "current"),
        peak=value("allocated_bytes", "peak"),
        inactive_split=value("inactive_split_bytes", "current"),
    )


def parse_flat(stats: Mapping[str, Any]) -> Figures:
    """Reads the form of the public ``memory_stats``, ``{"allocated_bytes.all.current": …}``."""
    return Figures(
        allocated=stats.get("allocated_bytes.all.current"),
        reserved=stats.get("reserved_bytes.all.current"),
        peak=stats.get("allocated_bytes.all.peak"),
        inactive_split=stats.get("inactive_split_bytes.all.current"),
    )


class _CudaLike:
    """Kinds whose module follows the shape of ``torch.cuda``; the module bears the kind's name."""

    kind: str

    def possible(self, torch: Any) -> bool:
        compiled = getattr(getattr(torch, self.kind), "_is_compiled", None)
        return compiled is None or bool(compiled())

    def ready(self, torch: Any) -> bool:
        return bool(getattr(torch, self.kind).is_initialized())

    def count(self, torch: Any) -> int:
        return int(getattr(torch, self.kind).device_count())

    def current(self, torch: Any) -> int:
        return int(getattr(torch, self.kind).current_device())

    def figures(self, torch: Any, index: int) -> Figures:
        # The public memory_stats flattens and sorts some 100 entries: 129 µs, where this takes 21.
        nested = _private(torch, f"_{self.kind}_memoryStats")
        if nested is not None:
            return parse_nested(nested(index))
        return parse_flat(getattr(torch, self.kind).memory_stats(index))

    def describe(self, torch: Any, index: int) -> Description:
        properties = getattr(torch, self.kind).get_device_properties(index)
        return Description(properties.name, properties.total_memory)


class CudaBackend(_CudaLike):
    """Nvidia's GPUs, and AMD's, which torch shows under the same name."""

    kind = "cuda"

    def figures(self, torch: Any, index: int) -> Figures:
        figures = super().figures(torch, index)
        return figures if _counts_splits(torch) else figures._replace(inactive_split=None)


def _counts_splits(torch: Any) -> bool:
    """Whether ``inactive_split_bytes`` is a count, or a zero that means nothing.

    ``cudaMallocAsync`` leaves it at zero, and the native allocator doesn't count expandable
    segments (c10/cuda/CUDACachingAllocator.cpp). Older versions of torch can't be asked for their
    settings; there such a zero passes for a count.
    """
    if torch.cuda.get_allocator_backend() != "native":
        return False
    settings = _private(torch, "_accelerator_getAllocatorSettings")
    return settings is None or "expandable_segments:True" not in settings()


class XpuBackend(_CudaLike):
    """Intel's GPUs; no splits."""

    kind = "xpu"


class MpsBackend:
    """Apple's GPUs; no peak, no splits. ``torch.accelerator.memory_*`` hits an assertion there.

    Every question about its memory initialises it, and none tells whether that has happened: so it
    isn't asked anything until somebody who holds a tensor there says so.
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

    def figures(self, torch: Any, _index: int) -> Figures:
        return Figures(
            allocated=torch.mps.current_allocated_memory(),
            reserved=torch.mps.driver_allocated_memory(),
        )

    def describe(self, torch: Any, _index: int) -> Description:
        get_name = getattr(torch.backends.mps, "get_name", None)
        product = None if get_name is None else get_name()
        return Description(product, torch.mps.recommended_max_memory())


class OtherBackend:
    """Any other device that ``torch.accelerator`` speaks for: Gaudi, Ascend, MTIA and the like."""

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
        """Such a device comes with a package of its own, perhaps imported later: asked now and then."""
        now = self._clock()
        if now < self._ask_again:
            return False
        self._ask_again = now + LOOK_EVERY_S
        device = torch.accelerator.current_accelerator()
        if device is not None:
            self.kind, self._found = device.type, True
        return self._found

    def count(self, torch: Any) -> int:
        return int(torch.accelerator.device_count())

    def current(self, torch: Any) -> int:
        return int(torch.accelerator.current_device_index())

    def figures(self, torch: Any, index: int) -> Figures:
        return parse_flat(torch.accelerator.memory_stats(index))

    def describe(self, torch: Any, index: int) -> Description:
        get_memory_info = getattr(torch.accelerator, "get_memory_info", None)
        return Description(None, None if get_memory_info is None else get_memory_info(index)[1])


def _has_own_backend(torch: Any) -> bool:
    """Whether this build of torch is for a kind that has a class of its own above.

    There ``current_accelerator`` has nothing new to say, and in its first versions it asked the
    driver, after which forked children can't use the device.
    """
    version = torch.version
    built_for = version.cuda or version.hip or getattr(version, "xpu", None)
    return bool(built_for or torch.backends.mps.is_built())


def _private(torch: Any, name: str) -> Callable[..., Any] | None:
    """A function that torch doesn't promise; ``None`` where this version lacks it."""
    function: Callable[..., Any] | None = getattr(torch._C, name, None)  # noqa: SLF001 - detected
    return function

"""Statistics that a device's allocator reports, read as cheaply as possible."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeAlias

import torch

from memlog.trace.records import Fragmentation

AllocatorBytes: TypeAlias = tuple[int, int | None]
"""Allocated bytes and reserved bytes; ``None`` if the reserved bytes are unknown."""

NOTHING_RESERVED = "the CPU has no caching allocator, so nothing is reserved"


def reader(device: torch.device) -> Callable[[], AllocatorBytes] | None:
    """Return a function that reads a device's statistics; ``None`` for the CPU.

    On the CPU only the resident set of the process is known. Its size does not change from layer to layer.
    """
    if device.type in ("cuda", "xpu"):
        return _caching_reader(device)
    if device.type == "mps":
        return _mps_reading
    return None


def fragmentation(
    device: torch.device, snapshot: Any = None
) -> tuple[Fragmentation | None, str | None]:
    """Return a device's current fragmentation, and the reason if the fragmentation is unknown.

    ``snapshot``: Snapshot of the allocator. If it has blocks of the device, the fragmentation is computed
    from them, otherwise from the allocator's statistics.
    """
    read = reader(device)
    if read is None:
        return None, NOTHING_RESERVED
    from memlog.trace.fragmentation import of_segments, of_statistics  # noqa: PLC0415 - the CPU needs none

    if snapshot is not None:
        found = of_segments(snapshot.get("segments", ()), device.index or 0)
        if found is not None:
            return found, None
    allocated, reserved = read()
    found = of_statistics(allocated, reserved)
    return found, None if found else f"{device.type} does not report reserved bytes"


def _caching_reader(device: torch.device) -> Callable[[], AllocatorBytes]:
    index = device.index or 0
    raw = getattr(torch._C, f"_{device.type}_memoryStats", None)
    if raw is not None:

        def quick() -> AllocatorBytes:
            values = raw(index)
            allocated = int(values["allocated_bytes"]["all"]["current"])
            return allocated, int(values["reserved_bytes"]["all"]["current"])

        return quick
    module: Any = getattr(torch, device.type)

    def public() -> AllocatorBytes:
        return int(module.memory_allocated(index)), int(module.memory_reserved(index))

    return public


def _mps_reading() -> AllocatorBytes:
    return int(torch.mps.current_allocated_memory()), int(torch.mps.driver_allocated_memory())

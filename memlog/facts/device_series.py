"""Levels of a device that are judged for growth: tensors, fragmented memory, and private pools.

Fragmented memory is what the allocator reserves beyond the most that tensors ever held at a time, without
private pools. A cache that is as large as the highest peak is used again and again, and steps that become
larger raise that peak. But if the allocator takes more memory although tensors never held more at a time, the
free blocks that it had did not fit. So this measure needs neither `inactive_split`, which is unknown with
expandable segments, nor the blocks themselves. It needs the peak, which is unknown on ``mps``.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

from memlog._internal.units import MIB
from memlog.events import ALLOCATED, DeviceReading

FRAGMENTED = ".fragmented"
PRIVATE_POOLS = ".private_pools"
OF_DEVICES = (ALLOCATED, FRAGMENTED, PRIVATE_POOLS)
"""Endings of the names of a device's series."""

_ALLOCATED_FLOOR = MIB / 2
_RESERVED_FLOOR = 64 * MIB
"""If a device's fragmented memory, or its private pools, grow by fewer bytes than this, the growth does not
count. The device's allocator reserves pieces of 2 to 20 MiB."""
_FRAGMENTED_PART = 0.2
"""If a device's fragmented memory grows by less than this fraction of the reserved memory, the growth does
not count. As steps become larger, even an allocator with expandable segments holds some percent more."""


class DeviceSeries(NamedTuple):
    """Level of one series of a device, in bytes.

    Growth of less than ``floor`` bytes does not count. The device's free memory is its capacity minus
    ``held`` bytes.
    """

    ending: str
    level: int
    floor: float
    held: int


def device_series(device: DeviceReading, most: int) -> Iterator[DeviceSeries]:
    """Yield the levels of a device. ``most``: highest number of bytes that its tensors held so far."""
    if device.allocated is None:
        return
    yield DeviceSeries(ALLOCATED, device.allocated, _ALLOCATED_FLOOR, device.allocated)
    if device.reserved is None:
        return
    private = device.private_pools or 0
    if private:
        yield DeviceSeries(PRIVATE_POOLS, private, _RESERVED_FLOOR, device.reserved)
    if device.peak is not None:
        floor = max(_RESERVED_FLOOR, _FRAGMENTED_PART * device.reserved)
        level = max(device.reserved - private - most, 0)
        yield DeviceSeries(FRAGMENTED, level, floor, device.reserved)

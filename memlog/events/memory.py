"""Named readings of memory in events: the only place that maps an event to levels and peaks."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Final, NamedTuple

import msgspec

from memlog.events.findings import OutOfMemory
from memlog.events.measurements import (
    Batch,
    Epoch,
    Evaluation,
    Phase,
    PinnedMemory,
    Recorded,
    Sample,
    Scope,
)
from memlog.events.parts import DeviceReading, PeakSource

if TYPE_CHECKING:
    from memlog.events import Event

HOST_RSS: Final = "host.rss"
HOST_ANON: Final = "host.anon"
SHARED: Final = "shared_memory"
HOST_PINNED: Final = "host.pinned"
PINNED_IN_USE: Final = "host.pinned_in_use"
TREE: Final = "host.tree"
CGROUP: Final = "host.cgroup"
AVAILABLE: Final = "host.available"
SWAP: Final = "host.swap"
ALLOCATED: Final = ".allocated"
RESERVED: Final = ".reserved"
DEVICE_USED: Final = ".device_used"
OF_OTHERS: Final = ".other"
OTHER_PROCESSES: Final = ".other_processes"
"""Endings of a device's kinds of memory, as in ``cuda0.reserved``: bytes that tensors hold, bytes that the
process's allocator holds, bytes that all processes use, bytes outside the process's allocator, and their part
that other processes use."""


class SampledKind(NamedTuple):
    """Kind of the host's memory that the helper process samples."""

    field: str
    """Field of `Sample`."""
    is_worst_low: bool = False
    """True if low values are a problem. Otherwise the highest value of a run is one of the run's peaks."""
    in_rules: bool = True
    """True if alert rules can name it."""


SAMPLED: Final = {
    TREE: SampledKind("tree_pss"),
    CGROUP: SampledKind("cgroup_used", in_rules=False),
    AVAILABLE: SampledKind("available", is_worst_low=True),
    SWAP: SampledKind("tree_swap"),
}
"""The sampled kinds by name. Each has readings, a metric and, unless ``is_worst_low``, a peak."""
HOST_PEAKS: Final = (
    HOST_RSS,
    *(name for name, kind in SAMPLED.items() if not kind.is_worst_low),
    HOST_PINNED,
)
"""Kinds of the host's memory whose highest value is a peak of the run."""


class Reading(msgspec.Struct, frozen=True, gc=False):
    """Bytes of one kind of memory, as an event reports them. ``None`` means unknown."""

    name: str
    """Kind of memory: `HOST_RSS` (resident set of the process), `HOST_ANON` (its part that is neither mapped
    files nor shared memory), `SHARED` (its shared memory), `HOST_PINNED` (page-locked memory of torch's
    allocator) and its part `PINNED_IN_USE`, a kind in `SAMPLED`, such as `TREE` (the process and its
    descendants), or a device's, such as ``cuda0.allocated``."""
    level: int | None
    """Bytes in use when the event was made."""
    peak: int | None = None
    """Highest ``level``. ``source`` tells whether it was reached in the event's own period."""
    source: PeakSource | None = None
    device: DeviceReading | None = None
    """All figures of the device's allocator; ``None`` for other memory."""
    space: int | None = None
    """Bytes of address space that memory of this kind can be in; ``None``: unknown."""

    @property
    def owner(self) -> str:
        """``host``, or the name of the device."""
        if self.device is not None:
            return self.device.name
        owner, dot, _ = self.name.partition(".")
        return owner if dot else "host"

    @property
    def highest(self) -> tuple[int | None, PeakSource | None]:
        """The peak and its source. If the peak is unknown: the level, with the source ``sampled``."""
        return (self.level, "sampled") if self.peak is None else (self.peak, self.source)


def readings(event: Event) -> Iterator[Reading]:
    """Yield the readings of memory in an event. Events that hold only changes of memory have none.

    A `ThreadStep` has none, because its step is not the session's.

    The host's readings come first, then those of each device in the event's order.
    """
    if isinstance(event, Sample):
        for name, kind in SAMPLED.items():
            yield Reading(name, getattr(event, kind.field))
        for device in event.devices:
            yield Reading(device.name + DEVICE_USED, device.used)
            yield Reading(device.name + OF_OTHERS, device.other)
            yield Reading(device.name + OTHER_PROCESSES, device.other_processes)
        return
    if isinstance(event, PinnedMemory):
        yield Reading(HOST_PINNED, event.held, event.peak, event.peak_source)
        yield Reading(PINNED_IN_USE, event.in_use)
        return
    if isinstance(event, OutOfMemory):
        yield from _of_failure(event)
        return
    for main in main_readings(event):
        yield main
        if main.device is not None:
            yield Reading(main.owner + RESERVED, main.device.reserved, None, None, main.device)
        elif isinstance(event, Batch):
            private, other = event.spaces or (None, None)
            yield Reading(HOST_ANON, event.rss_anon, space=private)
            yield Reading(SHARED, event.rss_shared, space=other)


def _of_failure(event: OutOfMemory) -> Iterator[Reading]:
    """Yield the readings at a failed allocation. All are peaks, because the failed step has not ended."""
    if event.worker is not None:
        return
    if event.device == "host":
        yield Reading(HOST_RSS, None, event.resident, "watermark")
        return
    size = event.allocated
    device = DeviceReading(event.device, None, event.reserved, size, "sampled", None)
    yield Reading(event.device + ALLOCATED, None, size, "sampled", device)
    yield Reading(event.device + RESERVED, None, event.reserved, "sampled", device)


def main_readings(event: Event) -> list[Reading]:
    """Return one reading of the process (`HOST_RSS`) and one of each device (its allocated bytes)."""
    if isinstance(event, (Batch, Epoch, Phase)):
        return _main(event.devices, event.rss, event.rss_peak, event.rss_peak_source)
    if isinstance(event, (Evaluation, Recorded)):
        return _main(event.devices, event.rss)
    return []


def peak_readings(event: Batch) -> list[Reading]:
    """Return the main readings of the devices with a known peak; if there is none, that of the process."""
    found = main_readings(event)
    if len(found) == 1:
        return found
    return [each for each in found[1:] if each.peak is not None] or found[:1]


def main_reading(event: Event, owner: str) -> Reading | None:
    """Return the main reading of ``host`` or of a device; ``None``: none."""
    return next((each for each in main_readings(event) if each.owner == owner), None)


def changes(event: Scope) -> list[Reading]:
    """Return the main readings of a watched block. Levels are changes, and peaks are absolute sizes."""
    return _main(event.devices, event.rss_change)


def _main(
    devices: tuple[DeviceReading, ...],
    rss: int | None,
    peak: int | None = None,
    source: PeakSource | None = None,
) -> list[Reading]:
    found = [Reading(HOST_RSS, rss, peak, source)]
    for each in devices:
        name = each.name + ALLOCATED
        found.append(Reading(name, each.allocated, each.peak, each.peak_source, each))
    return found

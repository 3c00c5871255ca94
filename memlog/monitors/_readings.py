"""What monitors read: the host, and the one accelerator that a monitor was made for."""

from __future__ import annotations

import functools
import re
from typing import Any

from memlog.events import DeviceReading, Epoch, Recorded, now_us
from memlog.monitors._publishing import HEALTH
from memlog.probes.accelerator import AcceleratorProbe
from memlog.probes.host import HostProbe
from memlog.probes.peaks import PeakWindow

MAX_LABEL = 500
"""Characters of a label that are kept."""


@functools.cache
def host() -> HostProbe:
    """The process's one probe: it keeps descriptors, and windows are the meters' own."""
    return HostProbe(HEALTH)


def device_index(device: Any) -> int:
    """``0`` of ``0``, ``"cuda:0"``, ``"cuda"`` or a ``torch.device``."""
    if isinstance(device, int):
        return device
    if isinstance(device, str):
        _, _, index = device.partition(":")
        return int(index) if index.isdigit() else 0
    return int(getattr(device, "index", None) or 0)


class Meter:
    """Reads memory at points in time; each has windows of its own, from one reading to the next.

    Args:
        device: The accelerator's index, or what torch calls it. It comes first in readings, and is the
            one that is printed.
    """

    def __init__(self, device: Any = 0) -> None:
        self._index = device_index(device)
        self._accelerators = AcceleratorProbe(HEALTH)
        self._window = PeakWindow()

    def __reduce__(self) -> tuple[type[Meter], tuple[int]]:
        """A copy, also one that is pickled, has windows of its own: a process's probes can't go with it."""
        return Meter, (self._index,)

    def rss(self) -> int | None:
        """This process's resident set, in bytes."""
        return host().figures()[0]

    def devices(self) -> tuple[DeviceReading, ...]:
        """The meter's device, where it is in use."""
        return tuple(r for r in self._accelerators.read() if _index_of(r) == self._index)

    def point(self, label: Any) -> Recorded:
        """What is held now, under a label."""
        return Recorded(now_us(), str(label)[:MAX_LABEL], self.rss(), self.devices())

    def epoch(self, epoch: int, step: int | None) -> Epoch:
        """What is held now, and the peaks since the last call."""
        rss, mark = host().figures()
        peak, source = self._window.advance(rss, mark)
        return Epoch(now_us(), epoch, step, rss, peak, source, self.devices())


def _index_of(reading: DeviceReading) -> int:
    found = re.search(r"\d+$", reading.name)
    return int(found.group()) if found else 0

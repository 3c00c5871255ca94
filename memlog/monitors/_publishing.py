"""Memory readings of monitors, and their publishing: events to the running session, lines to the console.

If no session runs, lines are printed and events are dropped. If a disabled session runs, nothing is published
or printed.
"""

from __future__ import annotations

import functools
import re
from collections.abc import Callable
from typing import Any

from memlog._internal import current_session, terminal
from memlog._internal.current_session import Publisher
from memlog._internal.diagnostics import Diagnostics
from memlog.events import DeviceReading, Epoch, Event, Recorded, now_us
from memlog.probes.accelerator import AcceleratorProbe
from memlog.probes.host import HostProbe, PeakWindow


class _MonitorDiagnostics(Diagnostics):
    """Counter of the monitors' errors.

    If a session runs, the errors are counted in the session's health; otherwise in this object.
    """

    def drop(self, reason: str, message: str, *, count: int = 1) -> None:
        running = session()
        if running is None:
            super().drop(reason, message, count=count)
        else:
            running.health.drop(reason, message, count=count)

    def fault(self, where: str, error: BaseException) -> None:
        running = session()
        if running is None:
            super().fault(where, error)
        else:
            running.health.fault(where, error)


HEALTH = _MonitorDiagnostics()
"""Counter of errors inside the monitors."""


def silenced() -> bool:
    """Return True if the current session is disabled. Monitors must then do nothing."""
    publisher = current_session.publisher()
    return publisher is not None and not publisher.enabled


def session() -> Publisher | None:
    """Return the session to publish to; ``None`` if no enabled session runs."""
    publisher = current_session.publisher()
    return publisher if publisher is not None and publisher.enabled else None


def publish(event: Event) -> None:
    """Publish an event to the running session, if there is one."""
    running = session()
    if running is not None:
        running.publish(event)


def print_notice(lines: Callable[..., str], *values: object) -> None:
    """Print the text that ``lines`` returns for ``values``, unless the text is empty. Never raises.

    ``lines`` is a function of `memlog.console`.
    """
    if not silenced():
        with HEALTH.contained("printing"):
            if text := lines(*values):
                terminal.out(text)


MAX_LABEL = 500
"""Maximum number of characters of a label. Further characters are cut off."""
MAX_POINTS = 10_000
"""Maximum number of points that a monitor keeps. After that, each new point replaces the oldest one. The
journal keeps all points."""


@functools.cache
def host() -> HostProbe:
    """Return the process's only host probe. The probe keeps files open, so all readers share it."""
    return HostProbe(HEALTH)


def device_index(device: Any) -> int:
    """Return a device's index: 0 for ``0``, ``"cuda:0"``, ``"cuda"`` or ``torch.device("cuda:0")``."""
    if isinstance(device, int):
        return device
    if isinstance(device, str):
        _, _, index = device.partition(":")
        return int(index) if index.isdigit() else 0
    return int(getattr(device, "index", None) or 0)


class MemoryReader:
    """Reader of memory at points in time. Each reader measures peaks since its own previous reading.

    Readings contain only one accelerator: ``device``, given by number or by torch's name.
    """

    def __init__(self, device: Any = 0) -> None:
        self._index = device_index(device)
        self._accelerators = AcceleratorProbe(HEALTH)
        self._window = PeakWindow()

    def __reduce__(self) -> tuple[type[MemoryReader], tuple[int]]:
        """Give a copied or unpickled reader new probes, because probes belong to their process."""
        return MemoryReader, (self._index,)

    def rss(self) -> int | None:
        """Return this process's resident set in bytes; ``None`` if unknown."""
        return host().read().rss

    def devices(self) -> tuple[DeviceReading, ...]:
        """Return the reading of the reader's device; empty if the device is not in use."""
        return tuple(r for r in self._accelerators.read() if _index_of(r) == self._index)

    def point(self, label: Any) -> Recorded:
        return Recorded(now_us(), str(label)[:MAX_LABEL], self.rss(), self.devices())

    def epoch(self, epoch: int, step: int | None) -> Epoch:
        """Read the memory in use now and the peaks since the last call."""
        rss, mark, *_ = host().read()
        peak, source = self._window.advance(rss, mark)
        return Epoch(now_us(), epoch, step, rss, peak, source, self.devices())


def _index_of(reading: DeviceReading) -> int:
    found = re.search(r"\d+$", reading.name)
    return int(found.group()) if found else 0

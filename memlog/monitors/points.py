"""Points in time: one measurement, or several under labels."""

from __future__ import annotations

import functools
import logging
import math
import sys
from collections import deque
from typing import Any

from memlog._internal.units import mib
from memlog.console import SummaryNotice, usage
from memlog.events import DeviceReading, Recorded
from memlog.monitors import _publishing
from memlog.monitors._readings import Meter, device_index

MAX_POINTS = 10_000
"""Points that a tracker keeps; the journal keeps all."""

_logger = logging.getLogger("memlog.memory")


class MemoryMonitor:
    """Measurements on the spot. "mb" is 1024² bytes."""

    @staticmethod
    def get_cpu_memory_mb() -> float:
        """This process's resident set; NaN where it can't be read."""
        return _known(mib(_meter(0).rss()))

    @staticmethod
    def get_gpu_memory_mb(device: Any = 0) -> float:
        """What tensors hold on a device; 0.0 where the process uses none, NaN where it can't be read."""
        reading = _reading(device)
        return 0.0 if reading is None else _known(mib(reading.allocated))

    @staticmethod
    def get_gpu_memory_reserved_mb(device: Any = 0) -> float:
        """What the caching allocator holds on a device; 0.0 and NaN likewise."""
        reading = _reading(device)
        return 0.0 if reading is None else _known(mib(reading.reserved))

    @staticmethod
    def get_memory_summary(device: Any = 0) -> dict[str, float]:
        """The figures by name, in MB of 1024² bytes.

        Returns:
            ``cpu_memory_mb``, ``gpu_memory_allocated_mb``, ``gpu_memory_reserved_mb``, and, with a CUDA
            device in use, ``gpu_memory_free_mb``: what the driver could still give to anybody.
        """
        summary = {
            "cpu_memory_mb": MemoryMonitor.get_cpu_memory_mb(),
            "gpu_memory_allocated_mb": MemoryMonitor.get_gpu_memory_mb(device),
            "gpu_memory_reserved_mb": MemoryMonitor.get_gpu_memory_reserved_mb(device),
        }
        with _publishing.HEALTH.contained("asking for a device's free memory"):
            reading = _reading(device)
            if reading is not None and reading.name.startswith("cuda"):
                free, _ = sys.modules["torch"].cuda.mem_get_info(device_index(device))
                summary["gpu_memory_free_mb"] = _known(mib(free))
        return summary

    @staticmethod
    def print_memory_usage(prefix: str = "", device: Any = 0) -> None:
        """Records a point and prints it: ``After loading: CPU: 850.2 MB | GPU Allocated: …``.

        Args:
            prefix: What the line begins with. A colon and a space are put behind it where it does not
                end in either.
            device: Whose figures.
        """
        if _publishing.silenced():
            return
        with _publishing.HEALTH.contained("printing memory"):
            point = _meter(device_index(device)).point(_as_prefix(str(prefix)))
            label = point.label.strip().rstrip(":") or "memory"
            event = Recorded(point.time_us, label, point.rss, point.devices)
            _publishing.publish(event, notice=point)

    @staticmethod
    def log_memory_usage(
        prefix: str = "",
        device: Any = 0,
        logger: logging.Logger | None = None,
        level: int = logging.INFO,
    ) -> None:
        """Records a point and logs the line that `print_memory_usage` prints.

        Args:
            prefix: What the line begins with, likewise.
            device: Whose figures.
            logger: ``None``: ``memlog.memory``.
            level: Its level.
        """
        if _publishing.silenced():
            return
        with _publishing.HEALTH.contained("logging memory"):
            text = _as_prefix(str(prefix))
            point = _meter(device_index(device)).point(text.strip().rstrip(":") or "memory")
            _publishing.publish(point)
            (logger or _logger).log(level, "%s%s", text, usage(point))


class MemoryTracker:
    """Records points under labels and prints them together.

    Args:
        device: Whose accelerator figures.
    """

    def __init__(self, device: Any = 0) -> None:
        self._meter = Meter(device)
        self._points: deque[Recorded] = deque(maxlen=MAX_POINTS)
        self._recorded = 0

    def record(self, label: str) -> None:
        """Records what is held now."""
        if _publishing.silenced():
            return
        with _publishing.HEALTH.contained("recording a point"):
            point = self._meter.point(label)
            self._points.append(point)
            self._recorded += 1
            _publishing.publish(point)

    def print_summary(self) -> None:
        """Prints a line for each point, in order."""
        points = tuple(self._points)
        _publishing.tell(SummaryNotice(points, self._recorded - len(points)))

    def get_peak_memory(self) -> dict[str, float]:
        """The largest figures among the recorded points, in MB of 1024² bytes.

        Returns:
            ``cpu_memory_mb``, ``gpu_memory_allocated_mb`` and ``gpu_memory_reserved_mb``; one that no
            point knows is left out. What was reached between points is not in them.
        """
        known: dict[str, float] = {}
        for point in tuple(self._points):
            for name, value in _figures(point):
                if value is not None:
                    known[name] = max(known.get(name, value), value)
        return known

    def clear(self) -> None:
        """Forgets the points; the journal keeps them."""
        self._points.clear()
        self._recorded = 0


def _figures(point: Recorded) -> list[tuple[str, float | None]]:
    figures = [("cpu_memory_mb", mib(point.rss))]
    for device in point.devices:
        figures.append(("gpu_memory_allocated_mb", mib(device.allocated)))
        figures.append(("gpu_memory_reserved_mb", mib(device.reserved)))
    return figures


def _as_prefix(prefix: str) -> str:
    """``"Epoch 3"`` and ``"Epoch 3: "`` give the same line."""
    if not prefix or prefix[-1].isspace():
        return prefix
    return f"{prefix} " if prefix.endswith(":") else f"{prefix}: "


@functools.cache
def _meter(index: int) -> Meter:
    return Meter(index)


def _reading(device: Any) -> DeviceReading | None:
    return next(iter(_meter(device_index(device)).devices()), None)


def _known(value: float | None) -> float:
    return math.nan if value is None else value

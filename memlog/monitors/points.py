"""Measurements of memory at points in time, printed one by one or together under their labels."""

from __future__ import annotations

import functools
import logging
import math
import sys
from collections import deque
from typing import Any

from memlog._internal.terminal import mib
from memlog.console import point_line, summary_lines, usage
from memlog.events import ALLOCATED, RESERVED, DeviceReading, Recorded, readings
from memlog.monitors import _publishing
from memlog.monitors._publishing import MAX_POINTS, MemoryReader, device_index

_NAMES = {
    ".rss": "cpu_memory_mb",
    ALLOCATED: "gpu_memory_allocated_mb",
    RESERVED: "gpu_memory_reserved_mb",
}
"""Names of a measurement's figures, by the ending of the kind of memory."""
_logger = logging.getLogger("memlog.memory")


class MemoryMonitor:
    """Measurements of the memory in use now. "mb" means 1024² bytes."""

    @staticmethod
    def get_cpu_memory_mb() -> float:
        """Return this process's resident set in MB; NaN if it can't be read."""
        return _known(mib(_reader(0).rss()))

    @staticmethod
    def get_gpu_memory_mb(device: Any = 0) -> float:
        """Return the memory of tensors on a device, in MB.

        The result is 0.0 if the process doesn't use the device, and NaN if the figure can't be read.
        """
        reading = _reading(device)
        return 0.0 if reading is None else _known(mib(reading.allocated))

    @staticmethod
    def get_gpu_memory_reserved_mb(device: Any = 0) -> float:
        """Return the memory that the caching allocator reserves on a device, in MB.

        The result is 0.0 if the process doesn't use the device, and NaN if the figure can't be read.
        """
        reading = _reading(device)
        return 0.0 if reading is None else _known(mib(reading.reserved))

    @staticmethod
    def get_memory_summary(device: Any = 0) -> dict[str, float]:
        """Return all figures by name, in MB of 1024² bytes.

        Returns:
            ``cpu_memory_mb``, ``gpu_memory_allocated_mb``, ``gpu_memory_reserved_mb``, and, if a CUDA device
            is in use, ``gpu_memory_free_mb``: memory that the driver could still give to any process.
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
        """Record a point and print it: ``After loading: CPU: 850.2 MB | GPU Allocated: …``.

        Args:
            prefix: Beginning of the line. The ``: `` at its end is optional.
            device: Accelerator whose figures are printed, such as ``0`` or ``"cuda:0"``.
        """
        if _publishing.silenced():
            return
        with _publishing.HEALTH.contained("printing memory"):
            _publishing.print_notice(point_line, _record(prefix, device))

    @staticmethod
    def log_memory_usage(
        prefix: str = "",
        device: Any = 0,
        logger: logging.Logger | None = None,
        level: int = logging.INFO,
    ) -> None:
        """Record a point and log the line that `print_memory_usage` prints.

        Args:
            prefix: Beginning of the line. The ``: `` at its end is optional.
            device: Accelerator whose figures are logged, such as ``0`` or ``"cuda:0"``.
            logger: Logger for the line; ``None``: the logger ``memlog.memory``.
            level: Logging level of the line.
        """
        if _publishing.silenced():
            return
        with _publishing.HEALTH.contained("logging memory"):
            point = _record(prefix, device)
            (logger or _logger).log(level, "%s%s", point.label, usage(point))


class MemoryTracker:
    """Recorder of points with labels. `print_summary` prints the points together.

    Args:
        device: Accelerator whose figures are read, such as ``0`` or ``"cuda:0"``.
    """

    def __init__(self, device: Any = 0) -> None:
        self._reader = MemoryReader(device)
        self._points: deque[Recorded] = deque(maxlen=MAX_POINTS)
        self._recorded = 0

    def record(self, label: str) -> None:
        """Record the memory in use now."""
        if _publishing.silenced():
            return
        with _publishing.HEALTH.contained("recording a point"):
            point = self._reader.point(label)
            self._points.append(point)
            self._recorded += 1
            _publishing.publish(point)

    def print_summary(self) -> None:
        """Print a line for each point, in order."""
        points = tuple(self._points)
        _publishing.print_notice(summary_lines, points, self._recorded - len(points))

    def get_peak_memory(self) -> dict[str, float]:
        """Return the largest figures among the recorded points, in MB of 1024² bytes.

        Returns:
            ``cpu_memory_mb``, ``gpu_memory_allocated_mb`` and ``gpu_memory_reserved_mb``. If no point
            has a figure, the figure is left out. Peaks between points are not included.
        """
        known: dict[str, float] = {}
        for point in tuple(self._points):
            for name, value in _figures(point):
                if value is not None:
                    known[name] = max(known.get(name, value), value)
        return known

    def clear(self) -> None:
        """Remove the points from this object; the journal keeps them."""
        self._points.clear()
        self._recorded = 0


def _figures(point: Recorded) -> list[tuple[str, float | None]]:
    return [
        (_NAMES[each.name.removeprefix(each.owner)], mib(each.level)) for each in readings(point)
    ]


def _record(prefix: str, device: Any) -> Recorded:
    """Publish a point, and return the same point with another label.

    The published label is ``prefix`` without a colon at its end. The returned label is the beginning of the
    printed line, with a colon and a space.
    """
    point = _reader(device_index(device)).point(_as_prefix(str(prefix)))
    label = point.label.strip().rstrip(":") or "memory"
    _publishing.publish(Recorded(point.time_us, label, point.rss, point.devices))
    return point


def _as_prefix(prefix: str) -> str:
    """Add a missing colon and space: ``"Epoch 3"`` and ``"Epoch 3: "`` give the same line."""
    if not prefix or prefix[-1].isspace():
        return prefix
    return f"{prefix} " if prefix.endswith(":") else f"{prefix}: "


@functools.cache
def _reader(index: int) -> MemoryReader:
    return MemoryReader(index)


def _reading(device: Any) -> DeviceReading | None:
    return next(iter(_reader(device_index(device)).devices()), None)


def _known(value: float | None) -> float:
    return math.nan if value is None else value

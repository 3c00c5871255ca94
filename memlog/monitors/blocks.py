"""Monitors of blocks, functions and batches, and measurements of memory at points in time."""

from __future__ import annotations

import functools
import logging
import math
import sys
import time
from collections import deque
from collections.abc import Callable
from typing import Any, TypeVar, overload

from memlog._internal.terminal import mib
from memlog.console import point_line, profile_lines, scope_lines, summary_lines, usage
from memlog.events import ALLOCATED, RESERVED, DeviceReading, Recorded, Scope, now_us, readings
from memlog.monitors import _publishing
from memlog.monitors._publishing import (
    MAX_POINTS,
    MemoryReader,
    device_index,
    require_function,
    within,
)

FunctionT = TypeVar("FunctionT", bound=Callable[..., Any])


class track_memory:  # noqa: N801 - a context manager, used like a function
    """Monitor of a block. It publishes and prints the change of memory, also after an exception.

    Blocks can be nested, because the process-wide peak is only read, never reset.

    Args:
        label: The block's name.
        device: Accelerator whose figures are read, by number or by torch's name, such as ``cuda:1``.
        print_output: ``True``: print a line at the block's end.
    """

    def __init__(
        self, label: str = "operation", device: Any = 0, print_output: bool = True
    ) -> None:
        self._label = label
        self._device = device
        self._print = print_output
        self._entered: list[tuple[MemoryReader, Recorded, int]] = []

    def __enter__(self) -> track_memory:  # noqa: PYI034 - typing.Self came with Python 3.11
        """Begin the block."""
        with _publishing.HEALTH.contained("entering a block"):
            if not _publishing.silenced():
                reader = MemoryReader(self._device)
                self._entered.append((reader, reader.point(self._label), time.perf_counter_ns()))
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        """End the block, also after an exception."""
        ended = time.perf_counter_ns()
        with _publishing.HEALTH.contained("leaving a block"):
            if self._entered:
                reader, before, begun = self._entered.pop()
                after = reader.point(self._label)
                # GeneratorExit: a caller closed the generator early, which is not an error.
                name = None if kind in {None, GeneratorExit} else kind.__name__
                event = _scope(before, after, (ended - begun) // 1000, name)
                _publishing.publish(event)
                if self._print:
                    _publishing.print_notice(scope_lines, event)


@overload
def monitor_memory(label: FunctionT, device: Any = 0, verbose: bool = True) -> FunctionT: ...
@overload
def monitor_memory(
    label: str | None = None, device: Any = 0, verbose: bool = True
) -> Callable[[FunctionT], FunctionT]: ...
def monitor_memory(label: Any = None, device: Any = 0, verbose: bool = True) -> Any:
    """Watch every call of a function, plain or async, as `track_memory` watches a block.

    Use it as ``@monitor_memory``, ``@monitor_memory()`` or ``@monitor_memory("training epoch")``, above or
    below ``@classmethod`` and ``@staticmethod``. A generator, async or not, is watched from its first item
    until it is exhausted or closed.

    Args:
        label: Name in the printed line; ``None``: the function's name.
        device: Accelerator whose figures are read, by number or by torch's name, such as ``cuda:1``.
        verbose: ``True``: print a line after each call.

    Raises:
        ConfigurationError: The decorated object can't be called.
    """
    if label is None or isinstance(label, str):
        return functools.partial(_watched, label=label, device=device, verbose=verbose)
    return _watched(label, None, device, verbose)


def _watched(function: Any, label: str | None, device: Any, verbose: bool) -> Any:
    if isinstance(function, (classmethod, staticmethod)):
        return type(function)(_watched(function.__func__, label, device, verbose))
    require_function("monitor_memory", function)
    name = label or str(getattr(function, "__name__", type(function).__name__))
    return within(functools.partial(track_memory, name, device, verbose), function)


def _scope(before: Recorded, after: Recorded, duration_us: int, error: str | None) -> Scope:
    held = {device.name: device for device in before.devices}
    devices = tuple(_changed(held.get(device.name), device) for device in after.devices)
    change = _difference(before.rss, after.rss)
    return Scope(now_us(), after.label, duration_us, change, devices, error)


def _changed(before: DeviceReading | None, after: DeviceReading) -> DeviceReading:
    """Return the change of a device's memory. A device that was not in use before counts from 0."""
    return DeviceReading(
        name=after.name,
        allocated=_difference(before.allocated if before else 0, after.allocated),
        reserved=_difference(before.reserved if before else 0, after.reserved),
        peak=after.peak,
        peak_source=after.peak_source,
        inactive_split=_difference(before.inactive_split if before else 0, after.inactive_split),
    )


def _difference(before: int | None, after: int | None) -> int | None:
    return None if before is None or after is None else after - before


class BatchMemoryProfiler:
    """Recorder of checkpoints within a batch. `print_summary` prints the checkpoints as a profile.

    Args:
        enabled: ``False``: nothing is read, published or printed until `enable`.
        device: Accelerator whose figures are read, by number or by torch's name, such as ``cuda:1``.
    """

    def __init__(self, enabled: bool = True, device: Any = 0) -> None:
        self._enabled = enabled
        self._reader = MemoryReader(device)
        self._points: deque[Recorded] = deque(maxlen=MAX_POINTS)

    def checkpoint(self, label: str) -> None:
        """Record the memory in use now."""
        if not self._enabled or _publishing.silenced():
            return
        with _publishing.HEALTH.contained("recording a checkpoint"):
            point = self._reader.point(label)
            self._points.append(point)
            _publishing.publish(point)

    def print_summary(self) -> None:
        """Print the change from each checkpoint to the next. With one checkpoint or none, print nothing."""
        if self._enabled:
            _publishing.print_notice(profile_lines, tuple(self._points))

    def reset(self) -> None:
        """Remove the checkpoints from this object; the journal keeps them."""
        self._points.clear()

    def enable(self) -> None:
        """Record and print from now on."""
        self._enabled = True

    def disable(self) -> None:
        """Record and print nothing until `enable`."""
        self._enabled = False


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

"""Monitors of blocks, functions and batches. They record the change of memory, and the peak."""

from __future__ import annotations

import functools
import time
from collections import deque
from collections.abc import Callable
from typing import Any, TypeVar, overload

from memlog.console import profile_lines, scope_lines
from memlog.events import DeviceReading, Recorded, Scope, now_us
from memlog.monitors import _publishing
from memlog.monitors._functions import require_function, within
from memlog.monitors._publishing import MAX_POINTS, MemoryReader

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

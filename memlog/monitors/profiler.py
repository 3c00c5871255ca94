"""Profile of one batch: the change of memory over each of its parts."""

from __future__ import annotations

from collections import deque
from typing import Any

from memlog.console import profile_lines
from memlog.events import Recorded
from memlog.monitors import _publishing
from memlog.monitors._readings import MAX_POINTS, MemoryReader


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

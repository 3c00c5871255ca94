"""Inside one batch: what each part of it left behind."""

from __future__ import annotations

from collections import deque
from typing import Any

from memlog.console import ProfileNotice
from memlog.events import Recorded
from memlog.monitors import _publishing
from memlog.monitors._readings import Meter

MAX_CHECKPOINTS = 10_000
"""Checkpoints that are kept until `BatchMemoryProfiler.reset`: the newest."""


class BatchMemoryProfiler:
    """Checkpoints within a batch, printed as a profile of it.

    Args:
        enabled: ``False``: nothing is read, published or printed until `enable`.
        device: Whose accelerator figures.
    """

    def __init__(self, enabled: bool = True, device: Any = 0) -> None:
        self._enabled = enabled
        self._meter = Meter(device)
        self._points: deque[Recorded] = deque(maxlen=MAX_CHECKPOINTS)

    def checkpoint(self, label: str) -> None:
        """Records what is held now."""
        if not self._enabled or _publishing.silenced():
            return
        with _publishing.HEALTH.contained("recording a checkpoint"):
            point = self._meter.point(label)
            self._points.append(point)
            _publishing.publish(point)

    def print_summary(self) -> None:
        """Prints the change from each checkpoint to the next; nothing with fewer than two."""
        if self._enabled:
            _publishing.tell(ProfileNotice(tuple(self._points)))

    def reset(self) -> None:
        """Forgets the checkpoints; the journal keeps them."""
        self._points.clear()

    def enable(self) -> None:
        """Goes on."""
        self._enabled = True

    def disable(self) -> None:
        """Stops: every call is then next to free."""
        self._enabled = False

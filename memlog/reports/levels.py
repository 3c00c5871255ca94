"""The memory that ran out, step by step: bytes in use after each step, and each step's peak."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from memlog.events import Batch, OutOfMemory, PeakSource
from memlog.reports.final_state import LastMoments


class Level(NamedTuple):
    """The memory in use after a step, in bytes."""

    step: int
    level: int
    own: int | None
    """Bytes by which the step's peak was higher; ``None``: unknown."""
    mark: int | None
    """Highest bytes in use since the process began, until this step's end; ``None``: unknown."""

    @property
    def most(self) -> int:
        """Highest known bytes in use in this step."""
        return self.level + (self.own or 0)


def levels(moments: LastMoments) -> list[Level]:
    """Return the levels after the last steps, of the process or of the device that failed."""
    failure = moments.failure
    if failure is None or failure.device == "host":
        return [
            _level(step.step, step.rss, step.rss_peak, step.rss_peak_source)
            for step in moments.steps
            if step.rss is not None
        ]
    return [
        _level(step.step, device.allocated, device.peak, device.peak_source)
        for step in moments.steps
        for device in step.devices
        if device.name == failure.device and device.allocated is not None
    ]


def are_all(series: Sequence[Level]) -> bool:
    """Return True if no step between the first and the last is missing: `every` may record only some."""
    return series[-1].step - series[0].step < len(series)


def failing_peak(failure: OutOfMemory | None, last: Batch | None) -> int | None:
    """Return the bytes in use, at the peak of the step that failed, on the device that failed.

    Args:
        failure: The failed allocation.
        last: The last complete step.

    Returns:
        Bytes; ``None`` if unknown. The kernel records one peak for the whole process, which is of the failing
        step only if it is higher than after the last step.
    """
    if failure is None or failure.worker is not None:
        return None
    if failure.device != "host":
        return failure.allocated
    if failure.resident is None or last is None or last.rss_peak is None:
        return None
    if last.rss_peak_source == "sampled" or failure.resident <= last.rss_peak:
        return None
    return failure.resident


def memory_name(failure: OutOfMemory | None) -> str:
    """Return the name of the memory that ran out, to begin a sentence."""
    on_host = failure is None or failure.device == "host"
    return (
        "The process's memory" if failure is None or on_host else f"The memory on {failure.device}"
    )


def _level(step: int, level: int, peak: int | None, source: PeakSource | None) -> Level:
    own = max(peak - level, 0) if peak is not None and source == "exact" else None
    return Level(step, level, own, None if source == "sampled" else peak)

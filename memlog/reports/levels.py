"""Memory in use after each step, and each step's peak, on the device (or host) that ran out of memory."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from memlog.events import Batch, OutOfMemory, main_reading
from memlog.reports.final_state import FinalState


class StepMemory(NamedTuple):
    """Memory in use after a step, and bounds of the step's peak, in bytes."""

    step: int
    level: int
    own: int | None
    """Bytes by which the step's peak was above ``level``, the memory in use after the step.
    ``None``: unknown."""
    mark: int | None
    """Upper bound of the step's peak: the peak counter at the step's end, in bytes; ``None``: unknown."""

    @property
    def most(self) -> int:
        """The step's peak in bytes if the exact peak is known, else ``level`` as a lower bound."""
        return self.level + (self.own or 0)


def levels(state: FinalState) -> list[StepMemory]:
    """Return the memory in use after each of the last steps, and bounds of the step's peak.

    If an allocation failed on a device, the sizes are that device's. Otherwise, the sizes are the process's.
    """
    device = "host" if state.failure is None else state.failure.device
    found: list[StepMemory] = []
    for step in state.steps:
        read = main_reading(step, device)
        if read is not None and read.level is not None:
            level, peak, source = read.level, read.peak, read.source
            own = max(peak - level, 0) if peak is not None and source == "exact" else None
            found.append(StepMemory(step.step, level, own, None if source == "sampled" else peak))
    return found


def are_all(series: Sequence[StepMemory]) -> bool:
    """Return False if steps between the first and the last are missing, as with ``every=10`` in ``init``."""
    return series[-1].step - series[0].step < len(series)


def failing_peak(failure: OutOfMemory | None, last: Batch | None) -> int | None:
    """Return the peak, in bytes, of the step that failed, on the device that failed; ``None`` if unknown.

    On the host, the kernel keeps one peak for the process's whole life, not one for each step. So the failing
    step's peak is known only if the process's peak rose after ``last``, the last complete step.
    """
    if failure is None or failure.worker is not None:
        return None
    if failure.device != "host":
        return failure.allocated
    before = None if last is None else main_reading(last, "host")
    if failure.resident is None or before is None or before.peak is None:
        return None
    if before.source == "sampled" or failure.resident <= before.peak:
        return None
    return failure.resident


def memory_name(failure: OutOfMemory | None) -> str:
    """Return the name of the memory that ran out, as the first words of a sentence."""
    if failure is None or failure.device == "host":
        return "The process's memory"
    return f"The memory on {failure.device}"

"""Find steps that became larger before a bad end, or a sudden rise of memory after the last step.

The test for growing steps counts records. A record is a step that peaked higher than every step before. If
steps come in random order, as with batches of random length, step number k is a record with probability 1/k.
In this case, records are independent of each other (Foster and Stuart 1954), so the mean and the variance of
their number are known. If steps grow, nearly every step is a record.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from math import sqrt
from statistics import median
from typing import NamedTuple

from memlog._internal.units import format_bytes
from memlog.reports.final_state import FinalState
from memlog.reports.levels import StepMemory, are_all, failing_peak, levels, memory_name

_FEWEST = 6
"""If there are fewer steps than this, no steps count as larger: even a rise in every step can be chance."""
_SIGMAS = 3
"""Number of standard deviations. Steps count as larger only if the number of new highest peaks is at least
this far above the mean number for steps in random order."""
_MATTERS = 0.1
"""Smallest growth that memlog reports, as a share. For growing steps: a share of a peak near the end. For a
sudden rise: a share of the memory in use after the last complete step."""
_MOST = 0.5
"""If larger steps caused less than this share of the rise in peaks, they do not explain the rise."""
_FAR = 2
"""A rise counts as sudden only if it exceeds this factor times `Sudden.needed`."""


class Sudden(NamedTuple):
    """Rise of memory after the last complete step. The rise is far larger than any step needed."""

    step: int
    """Number of the last complete step."""
    took: int
    """Bytes allocated after the last complete step."""
    needed: int
    """Upper bound, in bytes, of the memory that any single recorded step allocated and freed again."""


def rise(state: FinalState) -> str | None:
    """Return a line which says that the steps became larger; ``None`` if they did not."""
    series = levels(state)
    records = [series[0], *(each for each in series[1:] if each.own is not None)] if series else []
    count = len(series)
    if count < _FEWEST or not _are_many(len(records), count):
        return None
    if records[-1].step < series[-max(count // 4, 1)].step:
        return None  # the rise stopped
    needs = [each for each in records if each.own is not None]
    first = _middle(needs[: max(len(needs) // 4, 1)])
    last = max(needs[-max(len(needs) // 4, 1) :], key=_own)
    grown = _own(last) - _own(first)
    if grown < max(_MOST * (last.most - first.most), _MATTERS * last.most):
        return None
    steps = "steps" if are_all(series) else "recorded steps"
    return (
        f"{len(needs)} of the last {count} {steps} peaked higher than every one before. The "
        f"memory that was freed after a step's peak grew from {format_bytes(first.own)} (step "
        f"{first.step}) to {format_bytes(last.own)} (step {last.step}). So the "
        "steps became larger, as with longer inputs or batches: limit the largest."
    )


def sudden(state: FinalState) -> Sudden | None:
    """Return the rise of memory after the last complete step; ``None`` if it is unknown or not sudden."""
    series = levels(state)
    highest = failing_peak(state.failure, state.steps[-1] if state.steps else None)
    if not series or highest is None or any(each.mark is None for each in series):
        return None
    took = highest - series[-1].level
    # `mark` is an upper bound of the step's peak, so `needed` is an upper bound, too.
    needed = max((each.mark or 0) - each.level for each in series)
    if took <= max(_FAR * needed, _MATTERS * series[-1].level):
        return None
    return Sudden(series[-1].step, took, needed)


def why_steps_grew(state: FinalState) -> Iterator[str]:
    """Yield one line if steps became larger, or if memory rose suddenly; else yield nothing."""
    larger = rise(state)
    jump = sudden(state)
    if larger is not None:
        yield larger
    elif jump is not None:
        above = f"more than {format_bytes(jump.needed)} " if jump.needed else ""
        yield (
            f"{memory_name(state.failure)} grew by {format_bytes(jump.took)} after step {jump.step}; "
            f"no earlier step's peak was {above}above the memory in use at its end. So the cause came after "
            f"step {jump.step}: a far larger input, many more batches in one step, parameters that are "
            "trained for the first time, or work between steps, such as an evaluation without "
            "`torch.no_grad()` or loading of data."
        )


def _are_many(records: int, steps: int) -> bool:
    """Return True if ``records``, the number of new highest peaks, is too large for steps in random order."""
    mean = sum(1 / at for at in range(1, steps + 1))
    variance = sum(1 / at - 1 / at**2 for at in range(1, steps + 1))
    return records - mean >= _SIGMAS * sqrt(variance)


def _own(level: StepMemory) -> int:
    return level.own or 0


def _middle(some: Sequence[StepMemory]) -> StepMemory:
    middle = median(_own(each) for each in some)
    return min(some, key=lambda each: abs(_own(each) - middle))

"""Find steps that became larger before a bad end, or a sudden jump after the last step.

The test for growing steps counts records: steps that peaked higher than every step before. If steps come in
random order, such as batches of random length, the k-th is a record with probability 1/k, independently
(Foster and Stuart 1954). If steps grow, nearly each is a record.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from math import sqrt
from statistics import median
from typing import NamedTuple

from memlog._internal.units import format_bytes
from memlog.reports.final_state import LastMoments
from memlog.reports.levels import Level, are_all, failing_peak, levels, memory_name

_FEWEST = 6
"""Minimum number of steps. A rise in all of fewer steps may be chance."""
_SIGMAS = 3
"""The number of records is not chance if it is this many standard deviations above the mean."""
_MATTERS = 0.1
"""Minimum growth, as a share of the memory in use, that is reported."""
_MOST = 0.5
"""Share of the rise in peaks above which larger steps explain it."""
_FAR = 2
"""Multiple of the most that an earlier step needed. A larger jump is sudden."""


class Rise(NamedTuple):
    """Steps that allocated, and freed again, more and more memory."""

    records: int
    """Number of steps that peaked higher than every step before."""
    steps: int
    are_all: bool
    """True if the journal has every step; False if it has only some."""
    before: Level
    after: Level


class Sudden(NamedTuple):
    """Memory that was allocated after the last step, far more than any earlier step needed."""

    step: int
    """Number of the last complete step."""
    took: int
    """Bytes allocated after that step."""
    needed: int
    """Largest difference, in bytes, between an earlier step's peak and the memory in use after that step."""


def rise(moments: LastMoments) -> Rise | None:
    """Find steps that became larger; ``None`` if there is no such rise."""
    series = levels(moments)
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
    return Rise(len(needs), count, are_all(series), first, last)


def sudden(moments: LastMoments) -> Sudden | None:
    """Find a jump after the last step, far above the need of earlier steps; ``None`` if there is none."""
    series = levels(moments)
    highest = failing_peak(moments.failure, moments.steps[-1] if moments.steps else None)
    if not series or highest is None or any(each.mark is None for each in series):
        return None
    took = highest - series[-1].level
    # In a step in which the mark did not rise, it is an upper bound of the step's peak.
    needed = max((each.mark or 0) - each.level for each in series)
    if took <= max(_FAR * needed, _MATTERS * series[-1].level):
        return None
    return Sudden(series[-1].step, took, needed)


def why_steps_grew(moments: LastMoments) -> Iterator[str]:
    """Yield one line on steps that became larger, or else on a sudden jump; nothing if there was neither."""
    of, found = memory_name(moments.failure), rise(moments)
    if found is not None:
        steps = "steps" if found.are_all else "recorded steps"
        yield (
            f"{found.records} of the last {found.steps} {steps} peaked higher than every one before. The "
            f"memory that was freed after a step's peak grew from {format_bytes(found.before.own)} (step "
            f"{found.before.step}) to {format_bytes(found.after.own)} (step {found.after.step}). So the "
            "steps became larger, as with longer inputs or batches: limit the largest."
        )
        return
    jump = sudden(moments)
    if jump is not None:
        above = f"more than {format_bytes(jump.needed)} " if jump.needed else ""
        yield (
            f"{of} grew by {format_bytes(jump.took)} after step {jump.step}; no earlier step's peak was "
            f"{above}above the memory in use at its end. So the cause came after step {jump.step}: a far "
            "larger input, many more batches in one step, parameters that are trained for the first time, or "
            "work between steps, such as an evaluation without `torch.no_grad()` or loading of data."
        )


def _are_many(records: int, steps: int) -> bool:
    """Return True if steps in random order would have far fewer records."""
    mean = sum(1 / at for at in range(1, steps + 1))
    variance = sum(1 / at - 1 / at**2 for at in range(1, steps + 1))
    return records - mean >= _SIGMAS * sqrt(variance)


def _own(level: Level) -> int:
    return level.own or 0


def _middle(some: Sequence[Level]) -> Level:
    middle = median(_own(each) for each in some)
    return min(some, key=lambda each: abs(_own(each) - middle))

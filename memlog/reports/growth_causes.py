"""Explain why memory grew before a bad end: kept memory, mapped files or larger steps.

The test for growing steps counts records. A record is a step that peaked higher than every step before. If
steps come in random order, as with batches of random length, step number k is a record with probability 1/k.
In this case, records are independent of each other (Foster and Stuart 1954), so the mean and the variance of
their number are known. If steps grow, nearly every step is a record.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import cached_property
from math import sqrt
from statistics import median
from typing import NamedTuple

from memlog._internal.terminal import format_bytes
from memlog.events import Batch, OutOfMemory, main_reading
from memlog.growth import keeps_growing
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
    series: list[StepMemory] = []
    for step in state.steps:
        read = main_reading(step, device)
        if read is not None and read.level is not None:
            level, peak, source = read.level, read.peak, read.source
            own = max(peak - level, 0) if peak is not None and source == "exact" else None
            series.append(StepMemory(step.step, level, own, None if source == "sampled" else peak))
    return series


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
    records = (
        [series[0], *(memory for memory in series[1:] if memory.own is not None)] if series else []
    )
    count = len(series)
    if count < _FEWEST or not _are_many(len(records), count):
        return None
    if records[-1].step < series[-max(count // 4, 1)].step:
        return None  # the rise stopped
    needs = [memory for memory in records if memory.own is not None]
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
    if not series or highest is None or any(memory.mark is None for memory in series):
        return None
    took = highest - series[-1].level
    # `mark` is an upper bound of the step's peak, so `needed` is an upper bound, too.
    needed = max((memory.mark or 0) - memory.level for memory in series)
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
    middle = median(_own(memory) for memory in some)
    return min(some, key=lambda memory: abs(_own(memory) - middle))


_LEAST_STEPS = 20
"""If there are fewer steps than this, the growth does not count as kept memory: growth over few steps is too
common."""
_SOME = 0.25
"""If unused memory at the end makes up at least this share of the growth, memlog names two possible causes:
kept memory, or larger steps."""
FULL = 0.02
"""If less than this share of a limit is free, the limit counts as reached."""
_SMALL_REQUEST = 0.1
"""If a failed request is smaller than this share of the growth, the growth counts as the cause of the
failure, not the request."""


class GrowthBeforeEnd(NamedTuple):
    """Growth of the memory that ran out."""

    of: str
    """Name of the memory that ran out, as the first words of a sentence."""
    steps: int
    size: int
    """Bytes of growth."""
    files: int
    """Bytes of the growth that are pages of mapped files."""
    own: int | None
    """Growth, in bytes, of the memory that a step allocates and frees again; ``None``: unknown."""
    freed: int | None
    """Bytes that became free when the failed step ended; ``None``: unknown."""
    idle: int
    """Unused bytes that the process's allocator held at the end; a lower bound."""
    whole: int
    """Growth since the run's first step, in bytes."""
    lasting: bool
    """True if the memory kept growing over all of the last steps, or over their second half."""

    @property
    def is_of_files(self) -> bool:
        return self.files >= _MOST * self.size

    @property
    def is_of_larger_steps(self) -> bool:
        return (self.own or 0) >= _MOST * self.size

    @property
    def is_idle(self) -> bool:
        """True if most of the growth since the first step is memory that nothing uses."""
        return self.idle >= _MOST * self.whole

    @property
    def is_kept(self) -> bool:
        """True if the growth lasts and has no other cause: the program probably keeps memory of each step."""
        explained = self.is_of_files or self.is_of_larger_steps or self.is_idle
        return self.lasting and not explained


class GrowthCauses:
    """Causes of the growth before a bad end."""

    def __init__(self, state: FinalState) -> None:
        self._state = state

    @cached_property
    def growth(self) -> GrowthBeforeEnd | None:
        """Growth over the last steps; ``None`` if the growth is too small, or if there are too few steps."""
        return _growth(self._state)

    @cached_property
    def _short(self) -> _Short | None:
        return _too_short(self._state)

    @property
    def keeps(self) -> bool:
        """True if the probable cause is memory that the program keeps after each step."""
        return self.growth is not None and self.growth.is_kept

    @cached_property
    def _unexplained(self) -> int:
        """Bytes of growth, if neither larger steps nor files explain the growth; else 0."""
        if self.growth is not None and self.growth.is_kept:
            return self.growth.size
        if self._short is not None:
            return self._short.size
        jump = sudden(self._state)
        return 0 if jump is None or rise(self._state) is not None else jump.took

    @property
    def failed_by_chance(self) -> bool:
        """True if the failed request was small compared with the growth before the failure.

        The growth is then the cause. A request by any other program line would also have failed. A request of
        unknown size, as with Python's `MemoryError`, counts as small if nearly nothing was free.
        """
        failure = self._state.failure
        if failure is None or not self._unexplained:
            return False
        if failure.requested is None:
            return _is_full(failure)
        return failure.requested < _SMALL_REQUEST * self._unexplained

    def why_the_place_is_chance(self) -> Iterator[str]:
        """If `failed_by_chance`, yield a line which says that the failed request is not the cause."""
        failure = self._state.failure
        if failure is None or not self.failed_by_chance:
            return
        small = (
            "nearly nothing was free"
            if failure.requested is None
            else f"the request was for {format_bytes(failure.requested)}, after growth by "
            f"{format_bytes(self._unexplained)}"
        )
        if self._short is not None:
            yield f"The place of the failure may be chance: {small}."
        else:
            yield (
                f"The place of the failure is chance: {small}. Any next request would have failed; the "
                "growth before it is the cause."
            )

    def why_it_grew(self) -> Iterator[str]:
        """Yield one line on the cause of the growth; nothing if there is no growth or no known cause."""
        growth = self.growth
        if growth is None:
            short = self._short
            yield from why_steps_grew(self._state) if short is None else (short.line,)
            return
        grew = f"by {format_bytes(growth.size)} over the last {growth.steps} steps"
        if growth.is_of_files:
            yield (
                f"{growth.of} grew {grew}, and at least {format_bytes(growth.files)} of that are pages of "
                "mapped files: the kernel frees them when it needs memory, so they are no leak. A limit on "
                "the address space (ulimit -v) counts a mapping in full, read or not."
            )
        elif growth.is_kept:
            yield _kept(growth, grew)
        elif lines := list(why_steps_grew(self._state)):
            yield from lines
        elif growth.is_of_larger_steps:
            freed = (
                f", and {format_bytes(growth.freed)} were freed with the failed step's own memory"
                if growth.freed
                else ""
            )
            yield (
                f"{growth.of} grew {grew}; the memory that a step allocates and frees grew by "
                f"{format_bytes(growth.own)}{freed}. So the steps became larger, as with longer inputs "
                "or batches: limit the largest."
            )
        elif growth.is_idle:
            yield (
                f"{growth.of} grew {grew}, but at the end nothing used {format_bytes(growth.idle)} of it: "
                "the program had freed these blocks, and the C library's allocator keeps them. "
                "So the program does not keep most of it, and likely the steps became larger, as with longer "
                "inputs or batches: limit the largest. With `MALLOC_MMAP_THRESHOLD_=65536` "
                "in the environment, the allocator returns freed blocks at once."
            )


def _growth(state: FinalState) -> GrowthBeforeEnd | None:
    failure = state.failure
    series = levels(state)
    after = [memory.level for memory in series]
    if len(after) < _LEAST_STEPS or after[-1] - after[0] <= _MATTERS * after[0]:
        return None
    rising = _until_full(after) if _is_full(failure) else after
    lasting = any(
        len(part) >= _LEAST_STEPS and keeps_growing(part, 0.0)
        for part in (rising, rising[len(rising) // 2 :])
    )
    on_host = failure is None or failure.device == "host"
    size, freed = after[-1] - after[0], _freed(failure)
    begun = None if state.first is None else state.first.rss
    return GrowthBeforeEnd(
        memory_name(failure),
        state.steps[-1].step - state.steps[0].step,
        size,
        min(_of_files(state), size) if on_host else 0,
        _growth_of_a_step(series, freed),
        freed,
        (failure.idle or 0) if failure is not None and on_host else 0,
        max(size, after[-1] - begun) if on_host and begun is not None else size,
        lasting,
    )


class _Short(NamedTuple):
    """Growth over fewer than `_LEAST_STEPS` steps. The cause is unknown."""

    size: int
    line: str


def _too_short(state: FinalState) -> _Short | None:
    """Return the growth if fewer than `_LEAST_STEPS` steps were recorded.

    ``None`` if there are more steps, if the growth is too small, if the steps became larger, or if most of
    the growth came after the last complete step.
    """
    series = levels(state)
    if not 1 < len(series) < _LEAST_STEPS or rise(state) is not None:
        return None
    before, reached = series[0].level, max(memory.most for memory in series)
    last = failing_peak(state.failure, state.steps[-1])
    if state.failure is None and state.last_sample is not None:
        last = state.last_sample.tree_pss
    grown, whole = reached - before, max(last or 0, reached) - before
    if grown <= _MATTERS * before or grown < _MOST * whole:
        return None
    over, more = (
        f"the run's {len(series)} steps",
        f"To find the cause, run {_LEAST_STEPS} steps or more, for example with a smaller batch.",
    )
    if not are_all(series):
        over = f"the {len(series)} recorded steps"
        more = f"To find the cause, record {_LEAST_STEPS} steps or more, for example with a smaller `every`."
    return _Short(
        grown,
        f"{memory_name(state.failure)} rose by {format_bytes(grown)} over {over}, too few to find the "
        "cause: something may keep memory of each step, steps may have become larger, or a cache may fill. "
        f"{more}",
    )


def _kept(found: GrowthBeforeEnd, grew: str) -> str:
    often = (
        "Often it is a list of losses with their graphs (append `loss.item()` or `loss.detach()`), or a "
        "cache without a limit; if there are few tensors, a C library."
    )
    unused = found.idle >= _SOME * found.size
    if found.own is None or unused:
        of_it = f" (at the end nothing used {format_bytes(found.idle)} of it)" if unused else ""
        return (
            f"{found.of} grew throughout, {grew}{of_it}: either something keeps memory of each step, or the "
            f"steps became larger. {often}"
        )
    return f"{found.of} grew throughout, {grew}: something keeps memory of each step. {often}"


def _growth_of_a_step(series: Sequence[StepMemory], freed: int | None) -> int | None:
    """Return the bytes by which the temporary memory of a step grew (see `GrowthBeforeEnd.own`).

    ``freed``: bytes that became free when the failed step ended. ``None``: unknown.
    """
    quarter = len(series) // 4
    early = [memory.own for memory in series[:quarter] if memory.own is not None]
    late = [memory.own for memory in series[-quarter:] if memory.own is not None]
    late += [] if freed is None else [freed]
    return max(late) - round(median(early)) if early and late else None


def _freed(failure: OutOfMemory | None) -> int | None:
    if failure is None or failure.free is None or failure.free_after is None:
        return None
    return max(failure.free_after - failure.free, 0)


def _is_full(failure: OutOfMemory | None) -> bool:
    if failure is None or failure.free is None or not failure.limit:
        return False
    return failure.free < FULL * failure.limit


def _until_full(series: Sequence[int]) -> Sequence[int]:
    """Return the memory in use after each step, up to the step at which memory became full.

    C code can go on after a failed allocation. In this case, memory stays at its limit for many steps.
    """
    top = series[-1] - FULL * (series[-1] - series[0])
    # The first step at the limit belongs to the growth, because memory grew until then.
    below = [at for at, level in enumerate(series) if level < top]
    return series[: below[-1] + 2]


def _of_files(state: FinalState) -> int:
    """Return the bytes by which the pages of mapped files grew during the last steps."""
    first = state.steps[0].step
    files = [
        sample.tree_file
        for sample in state.samples
        if sample.tree_file is not None and sample.step is not None and sample.step >= first
    ]
    return files[-1] - files[0] if files else 0

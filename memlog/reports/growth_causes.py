"""Explain why memory grew before a bad end: kept memory, mapped files or larger steps."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import cached_property
from statistics import median
from typing import NamedTuple

from memlog._internal.units import format_bytes
from memlog.events import OutOfMemory
from memlog.growth import keeps_growing
from memlog.reports.final_state import FinalState
from memlog.reports.larger_steps import rise, sudden, why_steps_grew
from memlog.reports.levels import StepMemory, are_all, failing_peak, levels, memory_name

_LEAST_STEPS = 20
"""If there are fewer steps than this, the growth does not count as kept memory: growth over few steps is too
common."""
_MATTERS = 0.1
"""If memory grew by at most this share of the memory in use before the growth, memlog reports
no growth."""
_MOST = 0.5
"""If a cause makes up at least this share of the growth, it explains the growth."""
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
        found = self.growth
        if found is None:
            short = self._short
            yield from why_steps_grew(self._state) if short is None else (short.line,)
            return
        grew = f"by {format_bytes(found.size)} over the last {found.steps} steps"
        if found.is_of_files:
            yield (
                f"{found.of} grew {grew}, and at least {format_bytes(found.files)} of that are pages of "
                "mapped files: the kernel frees them when it needs memory, so they are no leak. A limit on "
                "the address space (ulimit -v) counts a mapping in full, read or not."
            )
        elif found.is_kept:
            yield _kept(found, grew)
        elif lines := list(why_steps_grew(self._state)):
            yield from lines
        elif found.is_of_larger_steps:
            freed = (
                f", and {format_bytes(found.freed)} were freed with the failed step's own memory"
                if found.freed
                else ""
            )
            yield (
                f"{found.of} grew {grew}; the memory that a step allocates and frees grew by "
                f"{format_bytes(found.own)}{freed}. So the steps became larger, as with longer inputs "
                "or batches: limit the largest."
            )
        elif found.is_idle:
            yield (
                f"{found.of} grew {grew}, but at the end nothing used {format_bytes(found.idle)} of it: the "
                "program had freed these blocks, and the C library's allocator keeps them. "
                "So the program does not keep most of it, and likely the steps became larger, as with longer "
                "inputs or batches: limit the largest. With `MALLOC_MMAP_THRESHOLD_=65536` "
                "in the environment, the allocator returns freed blocks at once."
            )


def _growth(state: FinalState) -> GrowthBeforeEnd | None:
    failure = state.failure
    series = levels(state)
    after = [each.level for each in series]
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
    before, reached = series[0].level, max(each.most for each in series)
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
    early = [each.own for each in series[:quarter] if each.own is not None]
    late = [each.own for each in series[-quarter:] if each.own is not None]
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

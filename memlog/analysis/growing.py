"""Why memory grew before a bad end, as far as the run's journal shows: kept, files, or larger steps."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from statistics import median
from typing import NamedTuple

from memlog.analysis.last_moments import LastMoments
from memlog.events import OutOfMemory, PeakSource
from memlog.growth import keeps_growing
from memlog.units import format_bytes

_LEAST_STEPS = 20
"""In fewer steps anything grows."""
_MATTERS = 0.1
"""Growth, as a share of what there was before, from which it is told."""
_MOST = 0.5
"""Share of the growth from which on its cause is told as the one."""
_FULL = 0.02
"""Share of a limit below which what is free under it is none."""
_LAST_STRAW = 0.01
"""Share of what is in use below which the failed request is none of the cause."""


class Growth(NamedTuple):
    """How the memory grew that ran out."""

    of: str
    """What grew, at the beginning of a sentence."""
    steps: int
    size: int
    files: int
    """Bytes of it that are pages of mapped files."""
    own: int | None
    """Bytes by which a step's own memory grew, which it gives back; ``None``: unknown."""
    freed: int | None
    """Bytes that came free with the failed step; ``None``: unknown."""
    lasting: bool
    """Whether it grew throughout."""

    @property
    def is_of_files(self) -> bool:
        """Whether mapped files make up most of it."""
        return self.files >= _MOST * self.size

    @property
    def is_of_larger_steps(self) -> bool:
        """Whether steps that need more explain it."""
        return (self.own or 0) >= _MOST * self.size

    @property
    def is_kept(self) -> bool:
        """Whether something keeps what each step makes, or nothing speaks against that."""
        return self.lasting and not self.is_of_files and not self.is_of_larger_steps


def growth(moments: LastMoments) -> Growth | None:
    """Growth over the last steps that is worth a word."""
    failure = moments.failure
    series = _levels(moments)
    levels = [each.level for each in series]
    if len(levels) < _LEAST_STEPS or levels[-1] - levels[0] <= _MATTERS * levels[0]:
        return None
    rising = _until_full(levels) if _is_full(failure) else levels
    lasting = any(
        len(part) >= _LEAST_STEPS and keeps_growing(part, 0.0)
        for part in (rising, rising[len(rising) // 2 :])
    )
    on_host = failure is None or failure.device == "host"
    size, freed = levels[-1] - levels[0], _freed(failure)
    return Growth(
        "The process's memory" if failure is None or on_host else f"The memory on {failure.device}",
        moments.steps[-1].step - moments.steps[0].step,
        size,
        min(_of_files(moments), size) if on_host else 0,
        _growth_of_a_step(series, freed),
        freed,
        lasting,
    )


def why_it_grew(moments: LastMoments) -> Iterator[str]:
    """One line on the growth's cause, where one shows; none if nothing grew."""
    found = growth(moments)
    if found is None:
        return
    grew = f"by {format_bytes(found.size)} over the last {found.steps} steps"
    if found.is_of_files:
        yield (
            f"{found.of} grew {grew}, and at least {format_bytes(found.files)} of that are pages of mapped "
            "files: the kernel takes them back where it needs room, so they are no leak. Under a limit on "
            "addresses (ulimit -v) a mapping counts in full, read or not."
        )
    elif found.is_of_larger_steps:
        freed = (
            f", and {format_bytes(found.freed)} came free again with the last"
            if found.freed
            else ""
        )
        yield (
            f"{found.of} grew {grew}; what a step needs for itself alone grew by {format_bytes(found.own)}"
            f"{freed}. So its steps became larger, as with longer inputs or batches: bound the largest."
        )
    elif found.is_kept:
        yield _kept(found, grew)


def last_straw(moments: LastMoments) -> bool:
    """Whether the failed request was the last and least of what had grown before.

    Where it was made is then chance, and the step that made it is no cause.
    """
    failure, found = moments.failure, growth(moments)
    if failure is None or failure.requested is None or found is None or not found.is_kept:
        return False
    levels = _levels(moments)
    return failure.requested < _LAST_STRAW * levels[-1].level


def of_the_last_straw(moments: LastMoments) -> Iterator[str]:
    """What the place of such a failure tells."""
    failure = moments.failure
    if failure is not None and last_straw(moments):
        yield (
            f"Where it failed says little: {format_bytes(failure.requested)} were asked for there, less than "
            "a hundredth of what was in use. Whoever asked next had failed; what grew before is the cause."
        )


def _kept(found: Growth, grew: str) -> str:
    often = (
        "Often it is a list of losses with their graphs (append `loss.item()` or `loss.detach()`), or a "
        "cache without a bound; where tensors are few, a C library."
    )
    if found.own is None:
        return (
            f"{found.of} grew throughout, {grew}: either something keeps what each step makes, or the steps "
            f"themselves became larger. {often}"
        )
    return f"{found.of} grew throughout, {grew}: something keeps what each step makes. {often}"


class _Level(NamedTuple):
    """The memory in use after a step, in bytes."""

    level: int
    own: int | None
    """What the step needed beyond that at its peak; ``None``: unknown."""


def _levels(moments: LastMoments) -> list[_Level]:
    """The memory that ran out, after each of the last steps."""
    failure = moments.failure
    if failure is None or failure.device == "host":
        return [
            _Level(step.rss, _own(step.rss, step.rss_peak, step.rss_peak_source))
            for step in moments.steps
            if step.rss is not None
        ]
    return [
        _Level(device.allocated, _own(device.allocated, device.peak, device.peak_source))
        for step in moments.steps
        for device in step.devices
        if device.name == failure.device and device.allocated is not None
    ]


def _own(level: int, peak: int | None, source: PeakSource | None) -> int | None:
    return max(peak - level, 0) if peak is not None and source == "exact" else None


def _growth_of_a_step(series: Sequence[_Level], freed: int | None) -> int | None:
    """By how much more a step needs for itself at the end than at first.

    Args:
        series: The levels, in order.
        freed: What the failed step gave back.
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
    """Whether nearly nothing was left under the limit."""
    if failure is None or failure.free is None or not failure.limit:
        return False
    return failure.free < _FULL * failure.limit


def _until_full(levels: Sequence[int]) -> Sequence[int]:
    """What came before a plateau at the limit: C code that is refused memory may go on without it."""
    top = levels[-1] - _FULL * (levels[-1] - levels[0])
    below = [at for at, level in enumerate(levels) if level < top]
    return levels[: below[-1] + 2]


def _of_files(moments: LastMoments) -> int:
    """By how much pages of mapped files grew over the last steps, as far as the samples tell."""
    first = moments.steps[0].step
    files = [
        sample.tree_file
        for sample in moments.samples
        if sample.tree_file is not None and sample.step is not None and sample.step >= first
    ]
    return files[-1] - files[0] if files else 0

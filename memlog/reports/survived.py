"""Facts and sentence about failed allocations that the program caught, as searches for a batch size do."""

from __future__ import annotations

from collections.abc import Sequence

from memlog.events import OutOfMemory
from memlog.reports.schema import Summary

_SIZES = 12
"""Maximum number of batch sizes to list."""


def batch_sizes(failures: Sequence[OutOfMemory]) -> list[int]:
    """Return the batch sizes with which allocations failed. Unknown ones are left out.

    `OutOfMemory.batch` comes first. Otherwise the size is the first dimension of those inputs in which the
    failures differ, or, if no input differs, the first dimension that all inputs have.
    """
    firsts = [
        {each.name: each.shape[0] for each in failure.inputs if each.shape} for failure in failures
    ]
    shared = set[str].intersection(*map(set, firsts))
    varied = [name for name in shared if len({first[name] for first in firsts}) > 1]
    sizes = []
    for failure, first in zip(failures, firsts, strict=True):
        found = {first[name] for name in varied or first}
        if failure.batch is not None:
            sizes.append(failure.batch)
        elif len(found) == 1:
            sizes += found
    return sizes


def survived(summary: Summary) -> str:
    """Return how many allocations failed after which training went on; empty if there was none."""
    number, sizes = summary.survived_failures, summary.survived_batch_sizes
    first, last = summary.survived_first_step, summary.survived_last_step
    if not number:
        return ""
    what = (
        "1 allocation failed and was" if number == 1 else f"{number:,} allocations failed and were"
    )
    where = f"at step {first:,}" if first == last else f"at steps {first:,} to {last:,}"
    tried = ", ".join(f"{size:,}" for size in sizes[:_SIZES])
    more = ", …" if len(sizes) > _SIZES else ""
    sized = "batch size" if len(sizes) == 1 else "batch sizes"
    # If a size was tried twice, or is unknown, the list does not tell the size of each failure.
    those = ", with the" if len(sizes) == number else "; known"
    of = f"{those} {sized} {tried}{more}" if sizes else ""
    return f"{what} survived {where}{of}"

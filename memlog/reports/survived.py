"""Sentence about failed allocations that the program caught, as searches for a batch size do."""

from __future__ import annotations

from memlog.reports.schema import Summary

_SIZES = 12
"""Maximum number of batch sizes to list."""


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
    of = f", with the {sized} {tried}{more}" if sizes else ""
    return f"{what} survived {where}{of}"

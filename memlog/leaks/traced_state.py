"""Growth of parameters, buffers and optimizer state between traced steps, which count their bytes exactly."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

from memlog._internal.units import format_bytes
from memlog.events import ALLOCATED, HOST_ANON, Trace
from memlog.growth.suspicion import Suspicion
from memlog.leaks.holders import Holder

_PART: Final = 0.5
"""If a category explains less than this part of the growth, it is not named."""
_REMEDIES: Final = {
    "parameters": "Look for layers or parameters that the program adds while it trains.",
    "buffers": "Look for a module that makes a buffer longer in its `forward()`, and limit its length.",
    "optimizer state": "Look for what the optimizer adds to its `state` in each step, and limit its length.",
}
"""Remedies by category of the tensors that stay from step to step."""


def cause_in_traces(traces: Sequence[Trace], growth: Suspicion) -> Holder | None:
    """Return the category that explains most of a growth; ``None`` if none does.

    ``traces`` are traced steps with exact figures, the oldest first. The first does not count, because the
    optimizer may have had no state yet.
    """
    device = "host" if growth.series == HOST_ANON else growth.series.removesuffix(ALLOCATED)
    if len(traces) < 3 or any(one.device != device for one in traces):  # noqa: PLR2004
        return None
    first, last = traces[1], traces[-1]
    steps = (last.step or 0) - (first.step or 0)
    gained = {one: last.at_peak.get(one, 0) - first.at_peak.get(one, 0) for one in _REMEDIES}
    category = max(gained, key=gained.__getitem__)
    if steps <= 0 or gained[category] < _PART * growth.rate * steps:
        return None
    rate = gained[category] / steps
    before, after = (format_bytes(one.at_peak.get(category, 0)) for one in (first, last))
    verb = "grows" if category == "optimizer state" else "grow"
    return Holder(
        "kept_tensors",
        f"{category.capitalize()} {verb} by {format_bytes(rate)} per step.",
        None,
        rate,
        (f"exact in traced steps: {before} in step {first.step}, {after} in step {last.step}",),
        "high",
        _REMEDIES[category],
    )

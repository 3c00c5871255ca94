"""Finding that steps need more memory because one of their inputs became larger."""

from __future__ import annotations

from math import ceil

from memlog._internal.units import format_bytes
from memlog.events import Finding, now_us
from memlog.inputs.relation import Relation

MUCH_LARGER = 1.5
"""A much larger step needs at least this many times the memory of a usual step. Memory that is still in use
after a step does not count."""
LEAST_EXCESS = 64 * 1024**2
"""Minimum difference, in bytes, between the memory of a much larger step and that of a usual step."""
_RESTS = 0.5
"""Maximum steps since the largest input, as a multiple of the steps before it, if the input still grows."""
_FAR = 10
"""Maximum bytes left until the limit, as a multiple of the peak's rise so far. If more bytes are left, memlog
makes no forecast, because the relation may change."""


def matters(found: Relation) -> bool:
    """Return True if the largest input needs far more memory than an input of the usual size."""
    needed, usual = found.peak - found.level, found.usual_peak - found.level
    return needed - usual >= LEAST_EXCESS and needed >= MUCH_LARGER * usual


def larger_steps(
    found: Relation,
    step: int,
    highest: int,
    device: str = "host",
    *,
    at_the_end: bool = True,
    free: int | None = None,
) -> Finding:
    """Return the finding that steps need more memory because an input became larger.

    ``step`` is the last complete step, and ``highest`` the run's highest peak so far, in bytes.
    ``device`` is ``host`` or an accelerator's name. ``at_the_end`` is true if the run has ended, so that no
    larger input can come. ``free`` is the number of bytes between the peak of ``found`` and the limit;
    ``None``: unknown.
    """
    of = "the process" if device == "host" else device
    if step - found.step > _RESTS * max(found.step - found.begin, 1):
        found = found._replace(per_step=0.0)  # the input has stopped growing
    return Finding(
        time_us=now_us(),
        step=step,
        kind="larger_steps",
        title=title(found, highest, at_the_end=at_the_end),
        where=f"dimension {found.dimension} of `{found.name}`",
        since_step=found.begin if found.rate else None,
        rate=found.rate,
        forecast=_forecast(found, free),
        limit=None if free is None or not found.rate else found.peak + free,
        evidence=(
            f"in steps with {found.values} different values from {found.smallest:,} to {found.largest:,}, "
            f"the peak differs from this relation by at most {format_bytes(found.error)}",
            f"the peak of {of} at {found.largest:,} was {format_bytes(found.peak)}; early in the run, "
            f"{format_bytes(found.usual_peak)} were usual",
        ),
        confidence="high" if found.is_linear else "medium",
        remedy=_remedy(found),
        memory=device,
    )


def _forecast(found: Relation, free: int | None) -> tuple[int, int] | None:
    """Return the earliest and the latest step at which the peak is expected to reach the limit.

    There is a forecast only if the input grows from step to step and the peak grows in proportion. Otherwise,
    the result is ``None``.
    """
    rise = found.peak - found.usual_peak
    if free is None or not found.rate or not found.is_linear or free > _FAR * rise:
        return None
    uncertain = found.per_step * found.error / max(found.largest - found.smallest, 1)
    if uncertain >= found.rate / 3:
        return None
    soonest, latest = free / (found.rate + uncertain), free / (found.rate - uncertain)
    return found.step + int(soonest), found.step + ceil(latest)


def title(found: Relation, highest: int, *, at_the_end: bool) -> str:
    """Return the relation in one sentence; the arguments are as in `larger_steps`."""
    what = f"dimension {found.dimension} of `{found.name}`"
    if found.is_length:
        what = f"the sequence length ({what})"
    elif not found.dimension:
        what += " (usually the batch size)"
    unit = " per token" if found.is_length else " per unit"
    each = f"{format_bytes(found.slope)}{unit}"
    how = "" if found.is_linear else f" at {found.largest:,}, and faster than in proportion"
    longest = "longest" if found.is_length else "largest"
    if not at_the_end:
        longest += " so far"
    # memlog does not read the inputs of every step, so it can miss a larger one.
    missing = ceil(100 * (highest - found.peak) / highest)
    reached = "reached the peak" if missing <= 0 else f"came within {missing}% of the peak"
    if missing > 0:
        longest += " that memlog looked at"
    return (
        f"The peak follows {what}: {each}{how}; the {longest}, {found.largest:,} at step "
        f"{found.step:,}, {reached}"
    )


def _remedy(found: Relation) -> str:
    if found.is_length:
        return (
            "Set a maximum length, and truncate or split longer sequences. Or put sequences of similar "
            "length into one batch, and make batches of long sequences smaller."
        )
    if not found.dimension:
        return (
            f"Set a maximum for the batch size of `{found.name}`, and split batches that exceed it."
        )
    return (
        f"Set a maximum for this dimension of `{found.name}`, and crop, split or resize inputs that "
        "exceed it."
    )

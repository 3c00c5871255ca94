"""Relation between the size of a step's inputs and its peak, and the finding that steps became larger.

An allocator reports only the highest number of bytes that were ever in use. So the peak of a step is known
only if this number rose in the step. If it did not rise, and no code reset it, it is an upper bound.

A dimension of an input explains the peaks if all of these hold:

- The dimension has at least five different values in steps whose peaks are known.
- A line or parabola that rises with the dimension fits all known peaks. The tolerance is 10 % of the peaks'
  range, or 15 % for a parabola with many values.
- The line or parabola exceeds the upper bounds of all other steps by at most this tolerance.
- A second fit, made without the largest input, predicts the peak of the largest input.
- The memory in use between steps does not rise with the peaks. If both rise, memory grows for another reason.

If several independent dimensions explain the peaks, no relation is found.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from itertools import accumulate, pairwise
from math import ceil
from typing import Final, NamedTuple, TypeAlias

from memlog._internal.terminal import format_bytes
from memlog.events import Finding, TensorInput, now_us

FEWEST = 5
"""If a dimension has fewer different values than this, memlog finds no relation between it and the peaks."""
_TOLERANCE = 0.1
"""If a known peak differs from the fit by more than this fraction of the peaks' range, memlog rejects the
fit."""
_MANY, _TOLERANCE_OF_MANY = 12, 0.15
"""For a parabola, `_TOLERANCE_OF_MANY` replaces `_TOLERANCE` if the dimension has at least `_MANY` different
values."""
_FALLS = 0.05
"""If the fit falls by more than this fraction of the peaks' range, memlog rejects the fit. A smaller fall is
accepted, because a parabola falls a little if the peaks of all small inputs are equal."""
_PREDICTED = 0.2
"""A second fit without the largest input predicts the largest input's peak. `_PREDICTED` is the maximum
error of the prediction, as a fraction of the peaks' range."""
_KEPT = 0.4
"""If the memory in use after the steps rose by more than this fraction of the peaks' rise, the program keeps
memory from step to step, and memlog finds no relation."""
_LEAST_RISE = 16 * 1024**2
"""If the range of the peaks is less than this number of bytes, memlog finds no relation, because the range
can be noise of the allocator."""

_FALLING: Final = 0.02
"""If an input's size falls in more than this fraction of the steps, it does not count as growing."""
_STEADY: Final = 0.5
"""An input's growth counts as steady if the rise per step in the second half of the steps is at least this
fraction of the rise per step in the first half."""

_Fit: TypeAlias = Callable[[float], float]


class StepPeak(NamedTuple):
    """Inputs of one step, and its peak."""

    step: int
    inputs: tuple[TensorInput, ...]
    peak: int
    """The step's peak in bytes if ``known`` is true; otherwise, a bound of the peak."""
    known: bool
    after: int | None
    """Bytes in use after the step; ``None``: unknown."""
    fresh: frozenset[str] = frozenset()
    """Names of the inputs whose tensors did not exist at the look before."""


class Relation(NamedTuple):
    """Dimension of an input that the peaks follow."""

    name: str
    """The input's name in the program."""
    dimension: int
    is_length: bool
    """True for a sequence length (the second dimension of an integer matrix, such as token ids)."""
    is_linear: bool
    slope: float
    """Bytes by which the fitted peak rises if the dimension grows from ``largest - 1`` to ``largest``."""
    smallest: int
    largest: int
    step: int
    """Step in which the dimension has its largest value."""
    values: int
    """Number of different values of the dimension in steps whose peaks are known."""
    error: int
    """Largest difference between a known peak and the fit, in bytes."""
    usual_peak: int
    """Peak in bytes that the fit predicts for a usual size: the dimension's median in the first half of the
    steps."""
    peak: int
    """Peak in bytes of ``step``, in which the dimension has its largest value."""
    level: int
    """Lowest number of bytes in use after a step, over all steps whose peaks are known; 0: unknown."""
    begin: int = 0
    """First of the steps that were compared."""
    per_step: float = 0.0
    """Mean growth of the dimension per step in the second half of the steps; 0 if it is not steady."""
    points: tuple[tuple[int, int], ...] = ()
    """Size of the dimension and peak in bytes of each step whose peak is known, in the order of the steps."""
    seen: int = 0
    """Largest value of the dimension, also in steps whose peaks are unknown."""
    batch: int | None = None
    """Size of the input's first dimension in ``step``; ``None``: the relation is about this dimension."""

    @property
    def rate(self) -> float | None:
        """Bytes per step by which the peaks rise now; ``None`` if the input varies without steady growth."""
        return self.slope * self.per_step or None


class _Dimension(NamedTuple):
    name: str
    axis: int
    rank: int
    dtype: str

    @property
    def is_length(self) -> bool:
        return self.axis == 1 and self.rank == 2 and self.dtype.startswith(("int", "uint"))  # noqa: PLR2004


def relation(steps: Sequence[StepPeak]) -> Relation | None:
    """Return the dimension that explains the peaks; ``None`` if none does, or several do.

    ``steps`` are in order.
    """
    known = [step for step in steps if step.known]
    if len(known) < FEWEST or _range(known) < _LEAST_RISE or _is_kept(known):
        return None
    relations = [
        explained
        for dimension in _independent(known)
        if (explained := _explained_by(dimension, steps)) is not None
    ]
    return relations[0] if len(relations) == 1 else None


def _range(known: Sequence[StepPeak]) -> int:
    return max(step.peak for step in known) - min(step.peak for step in known)


def _is_kept(known: Sequence[StepPeak]) -> bool:
    """Return True if memory in use between steps rose by more than `_KEPT` of the rise of the peaks."""
    first, last = known[0], known[-1]
    if first.after is None or last.after is None:
        return False
    return last.after - first.after > _KEPT * (last.peak - first.peak)


def _independent(known: Sequence[StepPeak]) -> Iterator[_Dimension]:
    """Yield one dimension of each set of dimensions that vary together.

    This dimension is the sequence length if the set contains it, or else the set's first dimension.
    """
    sets: list[tuple[list[int], list[_Dimension]]] = []
    for dimension, values in _varying(known):
        together = next((dimensions for of, dimensions in sets if _vary_together(of, values)), None)
        if together is None:
            sets.append((values, [dimension]))
        else:
            together.append(dimension)
    for _, together in sets:
        yield next((member for member in together if member.is_length), together[0])


def _varying(known: Sequence[StepPeak]) -> Iterator[tuple[_Dimension, list[int]]]:
    """Yield each dimension that every step has and whose size varies, with its size in each step."""
    sizes = [_sizes(step) for step in known]
    for dimension in sizes[0]:
        values = [of_step[dimension] for of_step in sizes if dimension in of_step]
        if len(values) == len(sizes) and len(set(values)) > 1:
            yield dimension, values


def _sizes(step: StepPeak) -> dict[_Dimension, int]:
    return {
        _Dimension(tensor.name, axis, len(tensor.shape), tensor.dtype): size
        for tensor in step.inputs
        for axis, size in enumerate(tensor.shape)
    }


def _vary_together(some: Sequence[int], others: Sequence[int]) -> bool:
    """Return True if one series is a multiple of the other plus a constant, as for labels and their mask."""
    at = next(at for at, value in enumerate(some) if value != some[0])
    # Products of whole numbers compare exactly, quotients would not.
    return all(
        (left - some[0]) * (others[at] - others[0]) == (right - others[0]) * (some[at] - some[0])
        for left, right in zip(some, others, strict=True)
    )


def _explained_by(dimension: _Dimension, steps: Sequence[StepPeak]) -> Relation | None:
    measured = [(_sizes(step).get(dimension), step) for step in steps]
    pairs = [(size, step) for size, step in measured if size is not None]
    known = [(size, step) for size, step in pairs if step.known]
    if len({size for size, _ in known}) < FEWEST:
        return None
    points = [(float(size), float(step.peak)) for size, step in known]
    bounds = [(float(size), float(step.peak)) for size, step in pairs if not step.known]
    # If a line fits, a parabola fits, too. So the line comes first.
    for degree in (1, 2):
        fit = _polynomial(points, degree)
        if fit is not None and _holds(fit, degree, points, bounds):
            break
    else:
        return None
    largest, at = max(known, key=lambda pair: pair[0])
    firsts = sorted(size for size, _ in pairs[: (len(pairs) + 1) // 2])
    return Relation(
        name=dimension.name,
        dimension=dimension.axis,
        is_length=dimension.is_length,
        is_linear=degree == 1,
        slope=fit(largest) - fit(largest - 1),
        smallest=min(size for size, _ in known),
        largest=largest,
        step=at.step,
        values=len({size for size, _ in known}),
        error=round(max(abs(fit(size) - peak) for size, peak in points)),
        usual_peak=round(fit(firsts[len(firsts) // 2])),
        peak=at.peak,
        level=min((step.after for _, step in known if step.after is not None), default=0),
        begin=pairs[0][1].step,
        per_step=_per_step([(step.step, size) for size, step in pairs]),
        points=tuple((size, step.peak) for size, step in known),
        seen=max(size for size, _ in pairs),
        batch=_sizes(at).get(dimension._replace(axis=0)) if dimension.axis else None,
    )


def _per_step(sizes: Sequence[tuple[int, int]]) -> float:
    """Return the mean rise per step in the second half of ``sizes``; 0 if the growth is not steady.

    ``sizes`` are pairs of a step and a size. `_FALLING` and `_STEADY` define steady growth.
    """
    falls = sum(after < before for (_, before), (_, after) in pairwise(sizes))
    if falls > _FALLING * len(sizes):
        return 0.0
    middle = sizes[len(sizes) // 2]
    before, now = _slope(sizes[0], middle), _slope(middle, sizes[-1])
    return now if now >= _STEADY * before else 0.0


def _slope(begin: tuple[int, int], end: tuple[int, int]) -> float:
    return (end[1] - begin[1]) / max(end[0] - begin[0], 1)


def _holds(
    fit: _Fit,
    degree: int,
    points: Sequence[tuple[float, float]],
    bounds: Sequence[tuple[float, float]],
) -> bool:
    """Return True if a fit rises, is near all points, and is not far above any bound.

    A second fit without the largest point must also predict that point.
    """
    wide = max(peak for _, peak in points) - min(peak for _, peak in points)
    sizes = sorted({size for size, _ in points})
    fitted = [fit(size) for size in sizes]
    falls = max(high - now for high, now in zip(accumulate(fitted, max), fitted, strict=True))
    if falls > _FALLS * wide or fitted[-1] < max(fitted):
        return False
    has_many = degree > 1 and len(sizes) >= _MANY
    error = wide * (_TOLERANCE_OF_MANY if has_many else _TOLERANCE)
    if any(abs(fit(size) - peak) > error for size, peak in points):
        return False
    if any(fit(size) - bound > error for size, bound in bounds):
        return False
    others = _polynomial([point for point in points if point[0] < sizes[-1]], degree)
    return others is not None and all(
        abs(others(size) - peak) <= _PREDICTED * wide for size, peak in points if size == sizes[-1]
    )


def _polynomial(points: Sequence[tuple[float, float]], degree: int) -> _Fit | None:
    """Return the polynomial fitted by least squares; ``None`` if the points do not determine it."""
    low = min(size for size, _ in points)
    span = max(size for size, _ in points) - low
    if len({size for size, _ in points}) <= degree:
        return None
    base = sum(peak for _, peak in points) / len(points)
    # Sizes from 0 to 1 keep the equations accurate. Powers of large sizes would lose digits.
    scaled = [((size - low) / span, peak - base) for size, peak in points]
    rows = [
        [
            *(sum(x ** (row + column) for x, _ in scaled) for column in range(degree + 1)),
            sum(y * x**row for x, y in scaled),
        ]
        for row in range(degree + 1)
    ]
    factors = _solved(rows)
    return lambda size: (
        base + sum(factor * ((size - low) / span) ** power for power, factor in enumerate(factors))
    )


def _solved(rows: list[list[float]]) -> list[float]:
    """Solve linear equations by elimination without row exchange. The matrix must be positive definite."""
    count = len(rows)
    for at in range(count):
        rows[at] = [number / rows[at][at] for number in rows[at]]
        for other in range(count):
            if other != at:
                factor = rows[other][at]
                rows[other] = [
                    number - factor * pivot
                    for number, pivot in zip(rows[other], rows[at], strict=True)
                ]
    return [row[-1] for row in rows]


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
    # Beyond a third, the latest step would be more than twice as far away as the soonest.
    if uncertain >= found.rate / 3:
        return None
    soonest, latest = free / (found.rate + uncertain), free / (found.rate - uncertain)
    return found.step + int(soonest), found.step + ceil(latest)


def title(found: Relation, highest: int, *, at_the_end: bool) -> str:
    """Return the relation in one sentence; the arguments are as in `larger_steps`."""
    dimension = f"dimension {found.dimension} of `{found.name}`"
    if found.is_length:
        dimension = f"the sequence length ({dimension})"
    elif not found.dimension:
        dimension += " (usually the batch size)"
    unit = " per token" if found.is_length else " per unit"
    per_unit = f"{format_bytes(found.slope)}{unit}"
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
        f"The peak follows {dimension}: {per_unit}{how}; the {longest}, {found.largest:,} at step "
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

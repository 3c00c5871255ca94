"""Memory that a batch with the data set's longest sample will need.

The peaks of steps are fitted by a line and by a parabola in the size of the inputs (least squares on
orthogonal polynomials). Attention that stores its scores makes the parabola. The memory of the longest batch
is the 95 % prediction interval of a new observation (Draper and Smith 1998, section 3.1). If the sizes seen
do not show whether the peaks follow a line or a parabola, both intervals count.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from math import gcd, sqrt
from typing import Literal, NamedTuple

import msgspec

from memlog._internal.terminal import format_bytes
from memlog.events import HOST_RSS, RESERVED, TREE, Device, Finding, PeaksBySize, now_us
from memlog.facts.levels import UNKNOWN, Peak, peak_kind

_FEWEST = 5
"""Minimum number of different sizes in a fit."""
_MANY = 8
"""If half of the sizes are at least this many, the interval of their own fit counts, too; else its middle."""
_ERROR, _ERROR_ON_HOST = 0.02, 0.05
"""If a peak differs from the fit by more than this fraction of the peaks' range, the fit does not count. The
process's peaks have more noise than a device's."""
_ROUNDED = 4 * 2**20
"""Bytes by which a device's peak can differ from a line in any case: CUDA's allocator leaves up to 1 MiB at
the end of each large block."""
_CLEARLY = 4
"""If the curvature is this many times its bound of significance, a parabola is a lower bound also far beyond
the sizes of its fit."""
_WIDE = 3
"""If the upper bound of the growth is more than this many times the lower one, only the lower one counts."""
_FAR, _FAR_OF_CURVE = 4, 2
"""If the size is more than this many times the largest one in the fit of a line, or of a parabola, only the
lower bound counts: another part of the step can have the peak by then, where it rises more."""
_FARTHEST = 8
"""If the size is more than this many times the largest one, nothing is told: small inputs can have their peak
in another part of the step, where it rises more."""
_NARROW = 0.05
"""A range whose width is less than this fraction of its mean is told as one number. If a parabola makes the
growth larger by less than this fraction, a line fits."""
_ROOM = 0.95
"""A batch fits if it needs at most this fraction of the limit. The rest is for what no allocator tells, such
as the context of CUDA."""
_LITTLE = 0.5
"""If only the lower bound is known, and it is below this fraction of the limit, the limit is not compared."""
_MISFIT, _MISFIT_OF_CURVE = 0.02, 0.05
"""Error of the prediction beyond the fit's, as a fraction of the growth. Steps are not exactly alike, and
CUDA's allocator rounds large blocks up by as much as 1 MiB. The second one is for the upper bound of a
parabola: small inputs can have their peak in another part of the step, where it rises less."""
_SPECIAL = 8
"""Tokens by which a batch can be longer than its longest sample, such as marks of its begin and end."""
_PADDED = 8
"""If the sizes have a common divisor of at least this, batches are padded to its multiples."""
_NEVER = 1e-3
"""If a longer sample would have been seen with a probability of more than 1 minus this, none comes."""
_QUANTILES = ((1, 12.71, 63.66), (2, 4.30, 9.92), (3, 3.18, 5.84), (4, 2.78, 4.60), (5, 2.57, 4.03),
              (6, 2.45, 3.71), (8, 2.31, 3.36), (10, 2.23, 3.17), (15, 2.13, 2.95))  # fmt: skip
"""Student's t distribution: degrees of freedom, its quantile of 97.5 %, and that of 99.5 %."""

LengthSource = Literal["data set", "collator", "seen"]


class LongestBatch(msgspec.Struct, frozen=True, kw_only=True):
    """Memory that a batch with the longest sample will need, or that the largest batch so far needed."""

    size: int
    """Size of the dimension in this batch."""
    source: LengthSource
    """Where the size is from: the data set's longest sample, the collator's limit, or the largest batch so
    far."""
    low_bytes: int
    """Lower bound of the peak."""
    high_bytes: int | None
    """Upper bound of the peak; ``None``: unknown. It is equal to ``low_bytes`` if such a batch was seen."""
    limit_bytes: int | None
    """Memory of the device, or memory that the training's processes may use; ``None``: unknown."""
    fits: bool | None
    """True if the batch fits, False if it needs more than the limit; ``None``: unknown."""
    device: str
    """``host``, or the device's name as in metric names."""
    where: str
    """The dimension, such as ``dimension 1 of `tokens```."""
    seen: int
    """Largest size so far."""
    text: str
    """All this in one sentence."""
    evidence: list[str]


def longest_batch(
    found: PeaksBySize,
    peaks: Mapping[str, Peak],
    devices: Mapping[str, Device],
    host_limit: int | None,
) -> LongestBatch | None:
    """Return the memory of a batch with the data set's longest sample; ``None`` if it can't be told.

    If that sample was seen, or its length is unknown, the result is about the largest batch so far.
    ``host_limit`` is the number of bytes that the training's processes may use together.
    """
    known = max(found.points)
    size, source = _longest(found)
    low: int = known[1]
    high: int | None = low
    evidence: list[str] = []
    if size > max(known[0], found.largest):
        predicted = _predicted(found, size)
        if predicted is None:
            return None
        low, high, evidence = predicted
    else:
        size = known[0]
    if found.lengths is not None and source != "seen":
        evidence.append(f"the longest sample's length is from {found.lengths.source}")
    limit, beside = _limit(found.device, peaks, devices, host_limit)
    fits = None
    # What a device's allocator holds beside tensors, it gives back before an allocation fails.
    in_use = beside if found.device == "host" else 0
    # A sampler of the program may leave the longest samples out.
    comes = size <= found.largest or (found.lengths is not None and found.lengths.takes_all)
    if limit is not None and low + in_use > limit and comes:
        fits = False
    elif limit is not None and high is not None and high + beside <= _ROOM * limit:
        fits = True
    where = f"dimension {found.dimension} of `{found.name}`"
    return LongestBatch(
        size=size,
        source=source,
        low_bytes=low,
        high_bytes=high,
        limit_bytes=limit,
        fits=fits,
        device=found.device,
        where=where,
        seen=found.largest,
        text=_text(found, where, size, source, (low, high), limit, fits=fits),
        evidence=evidence,
    )


def finding_of_longest(found: LongestBatch, step: int | None) -> Finding:
    """Return the finding that a batch with the longest sample needs more memory than there is."""
    return Finding(
        time_us=now_us(),
        step=step,
        kind="longest_batch",
        title=found.text.rstrip("."),
        where=found.where,
        since_step=None,
        rate=None,
        forecast=None,
        limit=found.limit_bytes,
        evidence=tuple(found.evidence),
        confidence="medium",
        remedy=(
            "Truncate or split longer samples, or make batches of long samples smaller, such as by a maximum "
            "number of tokens per batch."
        ),
        memory=found.device,
    )


def _longest(found: PeaksBySize) -> tuple[int, LengthSource]:
    """Return the size of the longest batch, and where it is from.

    The lengths of the samples do not count if they contradict the batches: a batch was longer, or longer
    samples would have been seen by now, because lengths are in another unit (letters) or are truncated later.
    """
    lengths = found.lengths
    if lengths is None:
        return found.largest, "seen"
    divisor = gcd(*(size for size, _ in found.points))
    padded = -(-lengths.longest // divisor) * divisor if divisor >= _PADDED else lengths.longest
    if found.largest > padded + _SPECIAL:
        return found.largest, "seen"
    if not (found.grows and found.dimension):
        draws = found.steps * ((found.batch or 1) if lengths.is_random else 1)
        share = next(
            (0.5**at for at, one in enumerate(lengths.tail, 1) if one > found.largest), 0.0
        )
        if (1 - share) ** draws < _NEVER:
            return found.largest, "seen"
    return max(padded, found.largest), "data set" if lengths.samples else "collator"


def _limit(
    device: str, peaks: Mapping[str, Peak], devices: Mapping[str, Device], host_limit: int | None
) -> tuple[int | None, int]:
    """Return the limit of a memory, and the bytes that are in use beside the steps' peak."""
    if device == "host":
        limit, names = host_limit, (TREE, HOST_RSS)
    else:
        known = devices.get(device)
        limit = None if known is None else known.capacity
        names = device + RESERVED, peak_kind(device)
    whole, part = (peaks.get(name, UNKNOWN).bytes for name in names)
    if device != "host" and limit is not None and (whole or 0) > _ROOM * limit:
        return limit, 0  # the allocator fills the device before it gives back what it does not use
    return limit, max((whole or 0) - (part or whole or 0), 0)


def _text(
    found: PeaksBySize,
    where: str,
    size: int,
    source: LengthSource,
    needs: tuple[int, int | None],
    limit: int | None,
    *,
    fits: bool | None,
) -> str:
    on = "in the process" if found.device == "host" else f"on {found.device}"
    batch = f"A batch of length {size:,}" if found.is_length else f"A batch with {where} = {size:,}"
    low, high = needs
    if source == "seen":
        unknown = "; the data set's longest sample is unknown" if found.is_length else ""
        return f"{batch}, the largest seen, needed {format_bytes(low)} {on}{unknown}."
    of = "the longest sample of the data set" if source == "data set" else "the collator's maximum"
    if size > found.largest:
        of += ", if none is cut or left out" if source == "data set" else ", if a batch reaches it"
    if size <= max(found.largest, max(found.points)[0]):
        return f"{batch} ({of}) needed {format_bytes(low)} {on}."
    if high is None:
        about = f"at least {format_bytes(low)}"
    elif high - low > _NARROW * (low + high) / 2:
        about = f"{format_bytes(low)} to {format_bytes(high)}"
    else:
        about = f"about {format_bytes((low + high) / 2)}"
    text = f"{batch} ({of}) will need {about} {on}"
    if limit is None or (high is None and low < _LITTLE * limit):
        return f"{text}."
    its = "the process's" if found.device == "host" else "its"
    room = f"{its} {format_bytes(limit)}"
    if fits is None:
        return f"{text}, and may not fit into {room}."
    return f"{text}: that fits into {room}." if fits else f"{text}: that is more than {room}."


class _Fit(NamedTuple):
    """Prediction by a polynomial, with its interval and its largest residual, in bytes."""

    low: float
    middle: float
    high: float
    error: float
    curvature: float
    """The highest coefficient, divided by its standard error."""
    free: int
    """Degrees of freedom."""


class _Range(NamedTuple):
    low: float
    middle: float
    high: float
    error: float
    kind: str


def _predicted(found: PeaksBySize, size: int) -> tuple[int, int | None, list[str]] | None:
    """Return the bounds of the peak at a size that was not seen, and the evidence.

    The fit is of all sizes, or else of the largest ones: small inputs can have their peak elsewhere. A fit of
    the larger half of its sizes must not contradict it: if it does, the range contains both.
    """
    together: dict[int, list[int]] = defaultdict(list)
    for at, peak in found.points:
        together[at].append(peak)
    points = [(float(at), sum(peaks) / len(peaks)) for at, peaks in sorted(together.items())]
    on_host = found.device == "host"
    error = (_ERROR_ON_HOST, 0) if on_host else (_ERROR, _ROUNDED)
    if size > _FARTHEST * points[-1][0]:
        return None
    fitted = _range(points, size, error)
    while fitted is None and len(points) > _FEWEST:
        points = points[1:]
        fitted = _range(points, size, error)
    if fitted is None:
        return None
    low, high = fitted.low, fitted.high
    larger = points[min(len(points) // 2, len(points) - _FEWEST) :]
    again = None if larger == points else _range(larger, size, error)
    if again is not None:
        has_many = len(larger) >= _MANY
        low = min(low, again.low if has_many else again.middle)
        high = max(high, again.high if has_many else again.middle)
    base, last = min(peak for _, peak in points), points[-1][1]
    beyond = _MISFIT if fitted.kind == "a line" else _MISFIT_OF_CURVE
    low, high = max(low - _MISFIT * (low - base), last), high + beyond * (high - base)
    far = _FAR if fitted.kind == "a line" else _FAR_OF_CURVE
    is_sure = high - base <= _WIDE * (low - base) and size <= far * points[-1][0]
    evidence = (
        f"the peaks of {len(points)} sizes from {points[0][0]:,.0f} to {points[-1][0]:,.0f} differ from "
        f"{fitted.kind} by at most {format_bytes(fitted.error)}; {size:,} is "
        f"{size / points[-1][0]:.1f} times the largest of these sizes",
        "the batch needs more if another part of the step then has the peak",
    )
    return round(low), round(high) if is_sure else None, list(evidence)


def _range(
    points: Sequence[tuple[float, float]], size: int, error: tuple[float, int]
) -> _Range | None:
    """Return the prediction of a line, a parabola, or both; ``None`` if neither fits.

    ``error``: Largest error of a fit, as a fraction of the peaks' range; and bytes that count as rounding.

    A peak is the largest of several sums that are not concave in the size, so it is not concave either. So a
    line that fits is a lower bound, and a parabola that falls below its line does not count.
    """
    if len(points) < _FEWEST:
        return None
    peaks = [peak for _, peak in points]
    share, rounded = error
    most = share * (max(peaks) - min(peaks))
    line, curve = (_fitted(points, degree, float(size)) for degree in (1, 2))
    bound = _quantiles(curve.free)[1]
    if abs(curve.curvature) > bound and line.error > rounded:
        if curve.curvature < 0 or curve.error > most:
            return None
        is_near = size <= _FAR_OF_CURVE * points[-1][0] or curve.curvature > _CLEARLY * bound
        low = curve.low if is_near else min(line.low, curve.low)
        return _Range(low, curve.middle, curve.high, curve.error, "a parabola")
    if line.error > max(most, rounded):
        return None
    high = max(line.high, curve.high)
    is_narrow = high - line.high <= _NARROW * (line.high - min(peaks))
    kind = "a line" if is_narrow else "a line and a parabola"
    return _Range(line.low, max(line.middle, curve.middle), high, line.error, kind)


def _quantiles(free: int) -> tuple[float, float]:
    """Return the quantiles of Student's t distribution, of at most so many degrees of freedom."""
    return next((inner, outer) for at, inner, outer in reversed(_QUANTILES) if at <= free)


def _fitted(points: Sequence[tuple[float, float]], degree: int, size: float) -> _Fit:
    """Fit a polynomial of degree 1 or 2 by least squares, and predict the peak at ``size``."""
    scale = points[-1][0]
    xs, ys, at = [x / scale for x, _ in points], [y for _, y in points], size / scale
    mean = sum(xs) / len(xs)
    columns, news = [[1.0] * len(xs), [x - mean for x in xs]], [1.0, at - mean]
    if degree > 1:
        squares, new = [one**2 for one in columns[1]], news[1] ** 2
        for column, known in zip(tuple(columns), tuple(news), strict=True):
            part = _dot(squares, column) / _dot(column, column)
            squares = [one - part * other for one, other in zip(squares, column, strict=True)]
            new -= part * known
        columns.append(squares)
        news.append(new)
    factors = [_dot(column, ys) / _dot(column, column) for column in columns]
    rests = [
        y - sum(factor * one for factor, one in zip(factors, row, strict=True))
        for y, row in zip(ys, zip(*columns, strict=True), strict=True)
    ]
    free = len(points) - degree - 1
    # An allocator rounds to 512 bytes, so no residual is exactly zero.
    deviation = max(sqrt(_dot(rests, rests) / free), 512.0)
    spread = sum(new**2 / _dot(column, column) for new, column in zip(news, columns, strict=True))
    middle = sum(factor * new for factor, new in zip(factors, news, strict=True))
    error = _quantiles(free)[0] * deviation * sqrt(1 + spread)
    norm = sqrt(_dot(columns[-1], columns[-1]))
    return _Fit(
        middle - error,
        middle,
        middle + error,
        max(map(abs, rests)),
        factors[-1] * norm / deviation,
        free,
    )


def _dot(some: Sequence[float], others: Sequence[float]) -> float:
    return sum(one * other for one, other in zip(some, others, strict=True))

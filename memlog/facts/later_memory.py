"""Memory that will be needed later: by the first checkpoint, and by a batch with the longest sample.

The rules follow from the sources of torch 2.13, safetensors 0.8, Transformers 5 and Lightning 2.6, and are
compared with real saves (docs/saving.md).

The peaks of steps are fitted by a line and by a parabola in the size of the inputs (least squares on
orthogonal polynomials). Attention that stores its scores makes the parabola. The memory of the longest batch
is the 95 % prediction interval of a new observation (Draper and Smith 1998, section 3.1). If the sizes seen
do not show whether the peaks follow a line or a parabola, both intervals count.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from math import gcd, sqrt
from typing import Final, Literal, NamedTuple

import msgspec
from msgspec.structs import replace

from memlog._internal.terminal import format_bytes
from memlog.events import (
    HOST_RSS,
    RESERVED,
    TREE,
    Device,
    Event,
    Finding,
    PeaksBySize,
    Phase,
    Sample,
    SavedState,
    SavingWay,
    now_us,
)
from memlog.facts.levels import UNKNOWN, Peak, peak_kind

SAVING_CALLS: Final[dict[SavingWay, str]] = {
    "state_dict": "state_dict()",
    "deepcopy": "copy.deepcopy(state_dict())",
    "cpu_copies": "state_dict() with .cpu()",
    "torch_save": "torch.save to a file",
    "torch_save_buffer": "torch.save to a BytesIO",
    "dcp_save": "dcp.save",
    "dcp_async_save": "dcp.async_save",
    "full_state_dict": "get_state_dict(full_state_dict, cpu_offload)",
    "full_state_dict_on_device": "get_state_dict(full_state_dict)",
    "save_pretrained": "save_pretrained (Transformers; the model alone)",
    "transformers_trainer": "Trainer (Transformers)",
    "lightning": "Trainer (Lightning)",
}
"""Each way as a few words, such as the call that a program makes."""
_MOVED: Final = 64 * 2**20
"""Bytes that the GNU C library may keep of a buffer that it has moved, as long as the buffer was small: twice
the size from which it maps memory."""
_GLOO_THREADS: Final = 2
"""Threads of a process group of Gloo. The C library keeps freed memory for each thread."""
_MOSTLY: Final = 0.95
"""Share of the bytes. If other processes have no part of them, the other bytes don't matter."""


class SavingCost(msgspec.Struct, frozen=True):
    """Peak of the memory that one way of saving takes in this process, in addition to the training's own.

    Attributes:
        way: The way of saving; docs/saving.md tells what each does.
        host: Bytes of the host's memory.
        device: Bytes of the device's memory.
        host_most: Bytes of the host's memory if the C library keeps all that it may keep of freed copies of
            tensors below 32 MiB, of a growing buffer, and of the threads that gather whole tensors. How
            much it keeps is chance.
    """

    way: SavingWay
    host: int
    device: int
    host_most: int


def saving_costs(state: SavedState) -> tuple[SavingCost, ...]:
    """Return the cost of each way of saving model and optimizer whose cost is known.

    Of several ranks, this is the one that saves.
    """
    return tuple(_costs(state))


def _costs(state: SavedState) -> Iterator[SavingCost]:
    model, optimizer = state.model, state.optimizer
    host, device = model.host + optimizer.host, model.device + optimizer.device
    copied = model.copied + optimizer.copied
    largest = max(model.largest, optimizer.largest)
    buffered = max(model.buffered, model.host + model.device + optimizer.buffered)
    small = model.small + optimizer.small
    buffered_most = buffered + small + min(_MOVED, buffered)
    gathered = max(model.gathered, optimizer.gathered)
    whole = model.whole + optimizer.whole
    on_host = max(model.gathered_on_host, model.whole_on_host + optimizer.gathered_on_host)
    kept = min(_GLOO_THREADS * _MOVED, model.whole_on_host + optimizer.whole_on_host)
    yield _cost("state_dict", 0)
    yield _cost("deepcopy", host, device=device)
    yield _cost("cpu_copies", device)
    yield _cost("torch_save", largest, most=min(largest + small, device))
    yield _cost("torch_save_buffer", buffered, most=buffered_most)
    # Replicated tensors are divided among the ranks in a way that this process does not know.
    alone = state.ranks == 1 or model.sharded + optimizer.sharded >= _MOSTLY * (host + device)
    if alone and (state.dcp_keeps_copies or not device):
        yield _cost("dcp_save", copied if state.dcp_keeps_copies else 0)
    yield _cost("dcp_async_save", host + device)
    full = on_host + whole + model.undivided + optimizer.undivided
    yield _cost("full_state_dict", full, device=gathered, most=full + kept)
    yield _cost("full_state_dict_on_device", on_host, device=whole, most=on_host + kept)
    if gathered or on_host:
        return  # Transformers and Lightning save distributed tensors in several other ways
    weights = model.buffered if state.safetensors_copies else model.device
    weights = min(weights, max(state.shard, model.largest))
    yield _cost("save_pretrained", weights)
    most = min(optimizer.largest + optimizer.small, optimizer.device)
    saved = max(weights, optimizer.largest)
    yield _cost("transformers_trainer", saved, most=max(weights, most))
    yield _cost("lightning", buffered, most=buffered_most)


def _cost(way: SavingWay, host: int, *, device: int = 0, most: int | None = None) -> SavingCost:
    return SavingCost(way, host, device, host if most is None else most)


def saving_rows(costs: Iterable[SavingCost]) -> list[tuple[str, str, str]]:
    """Return each way with the memory that it takes on host and device; the cheapest for the host first."""
    return [
        (
            SAVING_CALLS[cost.way],
            _bytes_between(cost.host, cost.host_most),
            format_bytes(cost.device),
        )
        for cost in sorted(costs, key=lambda cost: (cost.host, cost.device))
    ]


def _bytes_between(low: int, high: int) -> str:
    low_text, high_text = format_bytes(low), format_bytes(high)
    return low_text if low_text == high_text else f"{low_text} to {high_text}"


KIND: Final = "first_checkpoint"
SAVES: Final = "checkpoint"
"""Phase in which a trainer saves."""
_SAMPLES: Final = 3
"""Number of samples in a row with too little free memory. Loading of data can fill memory for a moment."""
_SMALL_FILE: Final = 10**9
"""Bytes of the files that the remedy for Transformers' Trainer makes."""
_REMEDIES: Final[dict[SavingWay, str]] = {
    "lightning": (
        "Lightning copies the checkpoint to a buffer before it writes. Pass Trainer(plugins=[…]) a subclass "
        "of TorchCheckpointIO whose save_checkpoint calls torch.save(checkpoint, path): that takes {file}."
    ),
    "transformers_trainer": (
        "The Trainer copies the weights of a whole file to the host. Smaller files take less: "
        "model.save_pretrained = functools.partial(model.save_pretrained, max_shard_size='1GB') before "
        "trainer.train()."
    ),
}


class FirstCheckpoint:
    """Subscriber that publishes a finding if it is known how the trainer will save, and this does not fit.

    ``publish`` is called with the finding. ``free`` returns the bytes that the training process can still
    take on the host; ``None``: unknown.
    """

    def __init__(self, publish: Callable[[Event], object], free: Callable[[], int | None]) -> None:
        self._publish = publish
        self._free = free
        self._state: SavedState | None = None
        self._cost: SavingCost | None = None
        self._short = 0

    def __call__(self, event: Event) -> None:
        if isinstance(event, SavedState):
            known = [cost for cost in saving_costs(event) if cost.way == event.way]
            self._state, self._cost, self._short = event, next(iter(known), None), 0
        elif isinstance(event, Phase):
            if event.label == SAVES:
                self._cost = None
        elif isinstance(event, Sample) and self._state is not None and self._cost is not None:
            free = self._free()
            self._short = self._short + 1 if free is not None and free < self._cost.host else 0
            if free is not None and self._short == _SAMPLES:
                self._publish(_finding(self._state, self._cost, free, event.step))
                self._cost = None


def _finding(state: SavedState, cost: SavingCost, free: int, step: int | None) -> Finding:
    at = "" if state.first_at is None else f" at step {state.first_at:,}"
    sizes = (part.host + part.device for part in (state.model, state.optimizer))
    model, optimizer = map(format_bytes, sizes)
    return Finding(
        time_us=now_us(),
        step=step,
        kind=KIND,
        title=(
            f"The first checkpoint{at} needs {format_bytes(cost.host)} of host memory; "
            f"{format_bytes(free)} are free"
        ),
        where=SAVES,
        since_step=None,
        rate=None,
        forecast=None,
        limit=None,
        evidence=(
            f"{SAVING_CALLS[cost.way]} saves {model} of the model and {optimizer} of the optimizer's state. "
            "What this takes follows from the sizes of the tensors.",
            f"The process could take {format_bytes(free)} more of its container or machine.",
        ),
        confidence="high",
        remedy=_remedy(state, cost),
    )


def _remedy(state: SavedState, cost: SavingCost) -> str | None:
    """Return what the program can do that it does not do yet; ``None``: nothing is known."""
    remedy = _REMEDIES.get(cost.way)
    smaller = {other.way: other for other in saving_costs(replace(state, shard=_SMALL_FILE))}
    if remedy is None or (
        cost.way == "transformers_trainer" and smaller[cost.way].host >= cost.host
    ):
        return None
    remedy = remedy.format(file=format_bytes(smaller["torch_save"].host_most))
    if cost.way == "lightning" and state.optimizer.host + state.optimizer.device:
        remedy += " ModelCheckpoint(save_weights_only=True) saves less."
    return remedy


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
    """What this is computed from."""


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
    # Rounded up: batches are padded to a multiple of the divisor.
    padded = -(-lengths.longest // divisor) * divisor if divisor >= _PADDED else lengths.longest
    if found.largest > padded + _SPECIAL:
        return found.largest, "seen"
    if not (found.grows and found.dimension):
        draws = found.steps * ((found.batch or 1) if lengths.is_random else 1)
        longer = (0.5**at for at, size in enumerate(lengths.tail, 1) if size > found.largest)
        share = next(longer, 0.0)
        # Probability that none of the longer samples was drawn so far.
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
    fitted = _range_of_peak(points, size, error)
    while fitted is None and len(points) > _FEWEST:
        points = points[1:]
        fitted = _range_of_peak(points, size, error)
    if fitted is None:
        return None
    low, high = fitted.low, fitted.high
    larger = points[min(len(points) // 2, len(points) - _FEWEST) :]
    again = None if larger == points else _range_of_peak(larger, size, error)
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


def _range_of_peak(
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
    bound = student_quantiles(curve.free)[1]
    # If the allocator's rounding explains the line's error, the curvature does not count.
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


def student_quantiles(free: int) -> tuple[float, float]:
    """Return the quantiles of Student's t distribution, of at most so many degrees of freedom."""
    # Fewer degrees of freedom than there are give a wider interval, never a narrower one.
    return next((inner, outer) for at, inner, outer in reversed(_QUANTILES) if at <= free)


def _fitted(points: Sequence[tuple[float, float]], degree: int, size: float) -> _Fit:
    """Fit a polynomial of degree 1 or 2 by least squares, and predict the peak at ``size``."""
    # Sizes up to 1, because the squares of large sizes lose digits.
    scale = points[-1][0]
    xs, ys, at = [x / scale for x, _ in points], [y for _, y in points], size / scale
    mean = sum(xs) / len(xs)
    columns, news = [[1.0] * len(xs), [x - mean for x in xs]], [1.0, at - mean]
    if degree > 1:
        squares, new = [distance**2 for distance in columns[1]], news[1] ** 2
        # Made orthogonal to the columns before, so that each factor is computed alone.
        for column, known in zip(tuple(columns), tuple(news), strict=True):
            part = _dot(squares, column) / _dot(column, column)
            squares = [square - part * other for square, other in zip(squares, column, strict=True)]
            new -= part * known
        columns.append(squares)
        news.append(new)
    factors = [_dot(column, ys) / _dot(column, column) for column in columns]
    rests = [
        y - sum(factor * value for factor, value in zip(factors, row, strict=True))
        for y, row in zip(ys, zip(*columns, strict=True), strict=True)
    ]
    free = len(points) - degree - 1
    # An allocator rounds to 512 bytes, so no residual is exactly zero.
    deviation = max(sqrt(_dot(rests, rests) / free), 512.0)
    spread = sum(new**2 / _dot(column, column) for new, column in zip(news, columns, strict=True))
    middle = sum(factor * new for factor, new in zip(factors, news, strict=True))
    # 1 is for the noise of the new observation, in addition to the error of the line.
    error = student_quantiles(free)[0] * deviation * sqrt(1 + spread)
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
    return sum(value * other for value, other in zip(some, others, strict=True))

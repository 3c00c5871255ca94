"""A smaller batch, a lighter optimizer: changes that scale what is there."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping
from typing import NamedTuple

from memlog.analysis.predict.course import START, Course, Life, Span, highest
from memlog.analysis.trace.stream import (
    BACKWARD,
    BEFORE,
    FORWARD,
    GRADIENT,
    INPUT,
    OPTIMIZER,
    OPTIMIZER_STATE,
    OUTSIDE,
    PARAMETER,
    RECOMPUTE,
)

_COUNTERS = 8
"""Bytes of a number that counts steps, at most."""
_ALLOCATORS_BLOCK = 512
"""What CUDA's and XPU's allocators make of such a number."""
_ALMOST_ALL = 0.95
"""Share of the state's bytes that must be so and so many numbers for each parameter, and of the bytes of
parameters with gradients that must have such a state."""


class State(NamedTuple):
    """What an optimizer keeps."""

    numbers: int
    """For each parameter."""
    parameters: int
    """Bytes of the parameters that it keeps them for: those that had gradients."""


def steady_peak(course: Course) -> int:
    """The peak of the step, were it not the first: with the optimizer's state there from the start."""
    return highest(course.spans(), course.length)


def with_batch(course: Course, share: float) -> int:
    """The peak with another batch.

    What grows with the batch is the inputs, and what a pass makes that is neither a gradient of a parameter
    nor a copy of one.

    Args:
        course: Of the traced step.
        share: Of the traced step's batch: 0.5 is half of it.
    """
    return highest(course.spans(_with_batch(course, share)), course.length)


def accumulated(course: Course, share: float) -> int:
    """The peak with another batch, the gradients of several being added up.

    From the second of them on, all gradients are there from the start; what the backward pass makes is added
    to them, and there besides until it is.

    Args:
        course: Of the traced step.
        share: Of the traced step's batch: 0.5 is half of it.
    """
    gradients = [life for life in course.lives if life.category == GRADIENT]
    before = [Span(START, life.begin, life.size) for life in gradients]
    besides = [
        Span(life.begin, min(course.turn_after(life.begin), life.end), life.size)
        for life in gradients
        if life.phase == BACKWARD
    ]
    spans = course.spans(_with_batch(course, share))
    return highest([*spans, *before, *besides], course.length)


def _with_batch(course: Course, share: float) -> dict[Life, float]:
    """The sizes of what grows with the batch."""
    copies = _copies(course)
    return {
        life: life.size * share
        for life in course.lives
        if life.category == INPUT
        or (
            life.passing
            and life.phase in (FORWARD, BACKWARD, RECOMPUTE)
            and life.size not in copies.get((life.layer, life.phase), ())
        )
    }


def _copies(course: Course) -> dict[tuple[int, int], set[int]]:
    """Sizes, by layer and phase, of what is made of a layer's parameters rather than of the batch.

    In the backward pass a gradient before it is added up; under autocast a copy in half the bytes, and its
    gradient.
    """
    found: dict[tuple[int, int], set[int]] = {}
    for layer, sizes in course.parameters().items():
        halves = {size // 2 for size in sizes}
        found[layer, FORWARD] = found[layer, RECOMPUTE] = halves
        found[layer, BACKWARD] = halves | set(sizes)
    return found


def state_bytes(course: Course) -> int:
    """Bytes of the optimizer's state."""
    return sum(life.size for life in course.lives if life.category == OPTIMIZER_STATE)


def kept_state(course: Course) -> State | None:
    """What the optimizer keeps for each parameter: two numbers in Adam, one in SGD with momentum.

    A parameter's state has its size and its layer. What is of a few bytes (Adam counts its steps in a number
    for each parameter) does not count.

    Returns:
        ``None`` where it keeps nothing, or its state is no whole number of times the parameters' bytes, as in
        Adafactor, which keeps sums over rows and columns.
    """
    smallest = _COUNTERS if course.trace.result.device == "cpu" else _ALLOCATORS_BLOCK
    kept = _by_layer_and_size(course, OPTIMIZER_STATE, smallest)
    stepped = _stepped(course, kept, smallest)
    if any(key.layer == OUTSIDE for key in kept):  # the trace ends before it says whose they are
        kept, stepped = _by_size(kept), _by_size(stepped)
    whole = Counter[int]()
    for key, count in kept.items():
        if stepped[key] and count % stepped[key] == 0:
            whole[count // stepped[key]] += key.size * count
    numbers, size = whole.most_common(1)[0] if whole else (0, 0)
    if not numbers or size < _ALMOST_ALL * _bytes(kept):
        return None
    # A sum over the rows of a weight may be as large as the bias by chance, but never as the weight.
    enough = size // numbers >= _ALMOST_ALL * _bytes(stepped)
    return State(numbers, size // numbers) if enough else None


def _stepped(course: Course, kept: Counter[_Key], above: int) -> Counter[_Key]:
    """The parameters with gradients, in the layers for which something is kept."""
    layers = {key.layer for key in kept}
    gradients = _by_layer_and_size(course, GRADIENT)
    found = _by_layer_and_size(course, PARAMETER, above).items()
    return Counter(
        {
            key: count
            for key, count in found
            if key in gradients and (key.layer in layers or OUTSIDE in layers)
        }
    )


class _Key(NamedTuple):
    layer: int
    size: int


def _by_layer_and_size(course: Course, category: int, above: int = 0) -> Counter[_Key]:
    return Counter(
        _Key(life.layer, life.size)
        for life in course.lives
        if life.category == category and life.size > above
    )


def _by_size(counts: Counter[_Key]) -> Counter[_Key]:
    sizes = Counter[_Key]()
    for key, count in counts.items():
        sizes[_Key(OUTSIDE, key.size)] += count
    return sizes


def _bytes(counts: Mapping[_Key, int]) -> int:
    return sum(key.size * count for key, count in counts.items())


def with_state(course: Course, size: float) -> int:
    """The peak with an optimizer whose state takes ``size`` bytes and whose step needs no room beside it."""
    state = Span(START, course.length, size)
    return highest([*_without_the_optimizer(course), state], course.length)


def _without_the_optimizer(course: Course) -> Iterator[Span]:
    for life in course.lives:
        if not _of_the_optimizer(life):
            yield Span(life.begin, life.end, life.size)


def _of_the_optimizer(life: Life) -> bool:
    """Its state, and what its step makes and drops."""
    made_by_it = life.phase == OPTIMIZER and life.passing
    return made_by_it or (life.category == OPTIMIZER_STATE and life.phase in (BEFORE, OPTIMIZER))

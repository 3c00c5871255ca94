"""A smaller batch, a lighter optimizer: changes that scale what is there."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator

from memlog.analysis.predict.course import START, Course, Life, Span, highest
from memlog.analysis.trace.stream import (
    BACKWARD,
    BEFORE,
    FORWARD,
    GRADIENT,
    INPUT,
    OPTIMIZER,
    OPTIMIZER_STATE,
    RECOMPUTE,
)


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


def moments(course: Course) -> int:
    """How many numbers the optimizer keeps for each parameter: two in Adam, one in SGD with momentum."""
    parameters = Counter(size for sizes in course.parameters().values() for size in sizes)
    kept = Counter(life.size for life in course.lives if life.category == OPTIMIZER_STATE)
    each = (kept[size] / count for size, count in parameters.items())
    return round(max(each, default=0))


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

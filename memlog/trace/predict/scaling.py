"""A smaller batch, and gradients that are added up: changes of what grows with the batch."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from typing import NamedTuple

from memlog.trace.encoding import BACKWARD, FORWARD, GRADIENT, INPUT, RECOMPUTE
from memlog.trace.predict.lifetimes import Course, Span, StorageLifetime, highest, steady_begin
from memlog.trace.predict.precision import PRODUCTS


class _Key(NamedTuple):
    layer: int
    size: int


def steady_peak(course: Course) -> int:
    """The peak of the step, were it not the first: with the optimizer's state there from the start."""
    return highest(course.module_stack(), course.length)


def with_batch(course: Course, share: float) -> int:
    """The peak with another batch.

    What grows with the batch is the inputs, and what a pass makes that is neither a gradient of a parameter
    nor a copy of one.

    Args:
        course: Of the traced step.
        share: Of the traced step's batch: 0.5 is half of it.
    """
    return highest(course.module_stack(_with_batch(course, share)), course.length)


def accumulated(course: Course, share: float) -> int:
    """The peak with another batch, the gradients of several being added up.

    From the second of them on, gradients are there since the optimizer's step before, in the place of those
    that were there still; what the backward pass makes is added to them, and is there besides until then.

    Args:
        course: Of the traced step.
        share: Of the traced step's batch: 0.5 is half of it.
    """
    made = [life for life in course.lives if life.category == GRADIENT and life.phase == BACKWARD]
    before = [Span(course.between_steps(one.begin).begin, one.begin, one.size) for one in made]
    besides = [
        Span(one.begin, min(course.turn_after(one.begin), one.end), one.size) for one in made
    ]
    replaced = _replaced(course, made)
    sizes = _with_batch(course, share)
    others = [
        Span(steady_begin(life), replaced.get(life, life.end), sizes.get(life, life.size))
        for life in course.lives
    ]
    return highest([*others, *before, *besides], course.length)


def _replaced(course: Course, made: Iterable[StorageLifetime]) -> dict[StorageLifetime, int]:
    """Gradients that are let go before new ones are made, and when those take their place."""
    places: dict[_Key, list[tuple[int, int]]] = {}
    for life in made:
        place = course.between_steps(life.begin).begin, life.begin
        places.setdefault(_Key(life.layer, life.size), []).append(place)
    found = {}
    for life in course.lives:
        if life.category == GRADIENT:
            for begin, end in places.get(_Key(life.layer, life.size), ()):
                if life.begin < end and begin < life.end <= end:
                    found[life] = max(begin, life.begin)
                    break
    return found


def _with_batch(course: Course, share: float) -> dict[StorageLifetime, float]:
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
    gradient. A layer of torch's that multiplies and is called once for each step makes no gradient but the
    one that stays: what else is as large there is of the batch.
    """
    found: dict[tuple[int, int], set[int]] = {}
    calls = Counter(
        (call.layer, course.step_of(call.begin)) for call in course.calls if call.phase == FORWARD
    )
    called = {layer for layer, _ in calls}
    repeated = {layer for (layer, _), count in calls.items() if count > 1}
    for layer, sizes in course.parameters().items():
        halves = {size // 2 for size in sizes}
        found[layer, FORWARD] = found[layer, RECOMPUTE] = halves
        once = layer in called - repeated and course.kind(layer) in PRODUCTS
        found[layer, BACKWARD] = halves if once else halves | set(sizes)
    return found

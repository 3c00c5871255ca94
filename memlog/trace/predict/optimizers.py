"""Lighter optimizers: what those of the traced step keep, and what the step would need with others."""

from __future__ import annotations

from bisect import bisect_right
from collections import Counter
from collections.abc import Mapping, Sequence
from collections.abc import Set as AbstractSet
from typing import NamedTuple

from memlog.trace.encoding import BEFORE, GRADIENT, OPTIMIZER, OPTIMIZER_STATE, OUTSIDE, PARAMETER
from memlog.trace.predict.lifetimes import (
    START,
    Course,
    Span,
    StorageLifetime,
    highest,
    steady_begin,
)
from memlog.trace.storage_uses import HALF_NOW

_COUNTERS = 8
"""Bytes of a number that counts steps, at most."""
_ALLOCATORS_BLOCK = 512
"""What CUDA's and XPU's allocators make of such a number."""
_ALMOST_ALL = 0.95
"""Share of a state's bytes that must be so and so many numbers for each parameter, and of the bytes of
parameters with gradients that must have such a state."""


class State(NamedTuple):
    """What an optimizer keeps."""

    step: int
    """The number of the first step of which it is known."""
    name: str
    """The optimizer's class; empty where the trace does not tell."""
    numbers: int
    """For each parameter: two in Adam, one in SGD with momentum."""
    parameters: int
    """Bytes of the parameters that it keeps them for: those that had gradients."""
    number: int
    """Bytes of a number of the state."""


def state_bytes(course: Course) -> int:
    """Bytes of the state of the optimizers that stepped."""
    return sum(life.size for life in course.lives if _is_in_use(course, life))


def idle_bytes(course: Course) -> int:
    """Bytes of the state of optimizers that are there and did not step."""
    return sum(life.size for life in course.lives if _is_idle(course, life))


def without_idle(course: Course) -> int:
    """The peak without the state of optimizers that did not step."""
    return highest(
        course.module_stack({life: 0.0 for life in course.lives if _is_idle(course, life)}),
        course.length,
    )


def kept_states(course: Course) -> list[State]:
    """What each optimizer keeps, in the order in which they step.

    A parameter's state has its size and its layer. What is of a few bytes (Adam counts its steps in a number
    for each parameter) does not count. An optimizer's state is heard of as it steps, so that those of one
    model's parameters are told apart.

    Returns:
        Nothing where they keep nothing, or one's state is no whole number of times the parameters' bytes, as
        in Adafactor, which keeps sums over rows and columns.
    """
    names = course.trace.optimizers
    told = len(names) == len(course.steps)
    groups, stepped = _by_step(course), _stepped(course)
    found, covered = list[State](), set[_Key]()
    for step, kept in groups.items():
        whole = _whole_number(kept, _those_of(step, groups, stepped))
        if whole is None:
            return []
        name = names[step] if told and step < len(names) else ""
        size = whole.size // whole.numbers
        found.append(State(step, name, whole.numbers, size, _bytes_of_a_number(course, step)))
        covered |= whole.keys
    # A sum over the rows of a weight may be as large as the bias by chance, but never as the weight.
    layers = {key.layer for kept in groups.values() for key in kept}
    of_theirs = _of_layers(stepped, layers)
    kept_for = sum(
        key.size * count
        for key, count in of_theirs.items()
        if key in covered or _Key(OUTSIDE, key.size) in covered
    )
    return found if kept_for >= _ALMOST_ALL * _bytes(of_theirs) else []


def with_states(course: Course, sizes: Mapping[int, float]) -> int:
    """The peak with other optimizers, whose steps need no room beside their state.

    Args:
        course: Of the traced step.
        sizes: Bytes of the new state, by the `State.step` of the one in whose place it comes.
    """
    module_stack = [Span(START, course.length, size) for size in sizes.values()]
    known = sorted(_by_step(course))
    module_stack += [
        Span(steady_begin(life), life.end, life.size)
        for life in course.lives
        if _is_idle(course, life)
        or not (_of_an_optimizer(life) and _step_of(course, life, known) in sizes)
    ]
    return highest(module_stack, course.length)


def _step_of(course: Course, life: StorageLifetime, known: Sequence[int]) -> int:
    """As which of the steps whose optimizers are known that of a storage counts: the latest until then.

    An optimizer that steps again, as a critic may, is known from its first step.
    """
    step = course.step_of(life.heard if life.category == OPTIMIZER_STATE else life.begin)
    return known[max(bisect_right(known, step) - 1, 0)]


class _Key(NamedTuple):
    layer: int
    size: int


class _Whole(NamedTuple):
    """So and so many numbers for each of some parameters."""

    numbers: int
    size: int
    """Bytes in all."""
    keys: frozenset[_Key]


def _by_step(course: Course) -> dict[int, Counter[_Key]]:
    """Each optimizer's state, by the step as which it was heard of."""
    smallest = _smallest(course)
    found: dict[int, Counter[_Key]] = {}
    for life in course.lives:
        if _is_in_use(course, life) and life.size > smallest:
            kept = found.setdefault(course.step_of(life.heard), Counter())
            kept[_Key(life.layer, life.size)] += 1
    return dict(sorted(found.items()))


def _bytes_of_a_number(course: Course, step: int) -> int:
    """Two where most of a state is in two bytes a number, as that of parameters in bfloat16 is."""
    half = Counter[bool]()
    for life in course.lives:
        if _is_in_use(course, life) and course.step_of(life.heard) == step:
            half[life.uses.type == HALF_NOW] += life.size
    return 2 if half[True] > half[False] else 4


def _smallest(course: Course) -> int:
    return _COUNTERS if course.trace.result.device == "cpu" else _ALLOCATORS_BLOCK


def _stepped(course: Course) -> Counter[_Key]:
    """The parameters that have gradients."""
    smallest = _smallest(course)
    gradients = {_Key(life.layer, life.size) for life in course.lives if life.category == GRADIENT}
    keys = (
        _Key(life.layer, life.size)
        for life in course.lives
        if life.category == PARAMETER and life.size > smallest
    )
    return Counter(key for key in keys if key in gradients)


def _whole_number(kept: Counter[_Key], stepped: Counter[_Key]) -> _Whole | None:
    """How many numbers are kept for each parameter; ``None`` where that is no whole number."""
    sizes, keys = Counter[int](), dict[int, set[_Key]]()
    if any(key.layer == OUTSIDE for key in kept):
        kept, stepped = _by_size(kept), _by_size(stepped)
    for key, count in kept.items():
        if stepped[key] and count % stepped[key] == 0:
            numbers = count // stepped[key]
            sizes[numbers] += key.size * count
            keys.setdefault(numbers, set()).add(key)
    numbers, size = sizes.most_common(1)[0] if sizes else (0, 0)
    if not numbers or size < _ALMOST_ALL * _bytes(kept):
        return None
    return _Whole(numbers, size, frozenset(keys[numbers]))


def _of_layers(counts: Counter[_Key], layers: AbstractSet[int]) -> Counter[_Key]:
    return Counter(
        {key: count for key, count in counts.items() if key.layer in layers or OUTSIDE in layers}
    )


def _those_of(
    step: int, groups: Mapping[int, Counter[_Key]], stepped: Counter[_Key]
) -> Counter[_Key]:
    """The parameters that an optimizer may keep something for."""
    layers = {key.layer for key in groups[step]}
    if OUTSIDE not in layers:
        return _of_layers(stepped, layers)
    # The trace ends before it says whose its state is: no other optimizer's, where their layers are told.
    others = {key.layer for other, kept in groups.items() if other != step for key in kept}
    rest = Counter({key: count for key, count in stepped.items() if key.layer not in others})
    return rest or stepped


def _by_size(counts: Counter[_Key]) -> Counter[_Key]:
    sizes = Counter[_Key]()
    for key, count in counts.items():
        sizes[_Key(OUTSIDE, key.size)] += count
    return sizes


def _bytes(counts: Counter[_Key]) -> int:
    return sum(key.size * count for key, count in counts.items())


def _of_an_optimizer(life: StorageLifetime) -> bool:
    """Its state, and what its step makes and drops."""
    return (life.phase == OPTIMIZER and life.passing) or _is_state(life)


def _is_in_use(course: Course, life: StorageLifetime) -> bool:
    return _is_state(life) and not _is_idle(course, life)


def _is_idle(course: Course, life: StorageLifetime) -> bool:
    """Whether it is of an optimizer that was known as the trace began, and has not stepped in it."""
    known_before = life.begin == START and life.heard < course.opened
    return bool(course.steps) and _is_state(life) and known_before


def _is_state(life: StorageLifetime) -> bool:
    return life.category == OPTIMIZER_STATE and life.phase in (BEFORE, OPTIMIZER)

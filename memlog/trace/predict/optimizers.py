"""State of a traced step's optimizers, and the step with other optimizers in their place."""

from __future__ import annotations

from bisect import bisect_right
from collections import Counter
from collections.abc import Mapping, Sequence
from collections.abc import Set as AbstractSet
from typing import Literal, NamedTuple, TypeAlias

from memlog.trace.encoding import (
    ALLOC,
    BEFORE,
    GRADIENT,
    OPTIMIZER,
    OPTIMIZER_STATE,
    OUTSIDE,
    PARAMETER,
    StreamEvent,
)
from memlog.trace.predict.lifetimes import (
    BEFORE_TRACE,
    ParameterKey,
    StorageLifetime,
    TracedStep,
)
from memlog.trace.records import HALF_NOW

_COUNTERS = 8
"""Maximum size of an optimizer's step counter on the CPU, in bytes."""
_ALLOCATOR_BLOCK = 512
"""Bytes of an optimizer's step counter on CUDA and XPU. The allocators of these devices allocate at least
this number of bytes."""
_ALMOST_ALL = 0.95
"""Lower limit for each of two fractions. Below it, `kept_states` returns an empty list.

* Bytes of the largest group in `_whole_values` / bytes of the optimizer's state.
* Bytes of the parameters in the largest groups / bytes of all parameters with gradients in layers with state.
"""


TWO_MOMENTS = 2
_EIGHT_BIT = 1 + 4 / 256
"""Bytes per value in the state of an 8-bit optimizer. Each value has one byte, and each block of 256 values
has four more bytes (Dettmers et al., "8-bit Optimizers via Block-wise Quantization", 2022, as in
bitsandbytes)."""
LighterOptimizer: TypeAlias = Literal["momentum", "no state", "8 bits"]
"""SGD with momentum, SGD without momentum, an optimizer whose state has 8 bits a number."""


class State(NamedTuple):
    """State that one optimizer keeps."""

    step: int
    """Index, counted from 0, of an optimizer step in which the trace shows this state."""
    name: str
    """Class of the optimizer; empty if unknown."""
    values: int
    """Number of values that the state has for each value of a parameter: two in Adam, one in SGD with
    momentum."""
    parameters: int
    """Bytes of the parameters that have this state. Only parameters with gradients have it."""
    value_bytes: int
    """Bytes of one value of the state."""


def state_bytes(traced: TracedStep) -> int:
    """Return the bytes of the state of all optimizers that stepped."""
    return sum(storage.size for storage in traced.storages if _is_in_use(traced, storage))


def idle_bytes(traced: TracedStep) -> int:
    """Return the bytes of the state of all optimizers that exist but did not step."""
    return sum(storage.size for storage in traced.storages if _is_idle(traced, storage))


def without_idle(traced: TracedStep) -> TracedStep:
    """Return the step without the state of optimizers that did not step."""
    idle = {storage for storage in traced.storages if _is_idle(traced, storage)}
    return traced.with_storages({}, removed=idle)


def kept_states(traced: TracedStep) -> list[State]:
    """Return the state that each optimizer keeps, in the order of the optimizers' steps.

    A parameter and the storages of its state have the same layer and size. States of a few bytes, such as
    Adam's counter of steps for each parameter, do not count. The states of two optimizers of one model are
    separate items.

    The list is empty if the optimizers keep no state. It is also empty if the size of an optimizer's state is
    not a whole multiple of the parameters' size. An example is Adafactor, which keeps sums over rows and
    columns.
    """
    names = traced.trace.optimizers
    named = len(names) == len(traced.optimizer_steps)
    groups, stepped = _by_step(traced), _stepped(traced)
    states, covered = list[State](), set[ParameterKey]()
    for step, kept in groups.items():
        whole = _whole_values(kept, _candidates(step, groups, stepped))
        if whole is None:
            return []
        name = names[step] if named and step < len(names) else ""
        size = whole.size // whole.values
        states.append(State(step, name, whole.values, size, _value_bytes(traced, step)))
        covered |= whole.keys
    # A sum over a weight's rows can have the size of the bias, and then counts as state of the bias. So the
    # parameters with state must have almost all bytes of these layers.
    layers = {key.layer for kept in groups.values() for key in kept}
    in_layers = _of_layers(stepped, layers)
    kept_for = sum(
        key.size * count
        for key, count in in_layers.items()
        if key in covered or ParameterKey(OUTSIDE, key.size) in covered
    )
    return states if kept_for >= _ALMOST_ALL * _bytes(in_layers) else []


def lighter_states(kept: Sequence[State], lighter: LighterOptimizer) -> dict[int, float]:
    """Return the bytes of the states of lighter optimizers, by the `State.step` that each replaces.

    SGD with momentum replaces only optimizers that keep two or more numbers for each parameter. Optimizers of
    8 bits keep at most two (for AMSGrad, too).
    """
    if lighter == "momentum":
        return {state.step: state.parameters for state in kept if state.values >= TWO_MOMENTS}
    if lighter == "no state":
        return {state.step: 0.0 for state in kept}
    return {
        state.step: min(state.values, TWO_MOMENTS)
        * state.parameters
        / state.value_bytes
        * _EIGHT_BIT
        for state in kept
    }


def with_states(traced: TracedStep, sizes: Mapping[int, float]) -> TracedStep:
    """Return the step with other optimizers in place of some of its own.

    The steps of the new optimizers allocate only state. ``sizes`` maps the `State.step` of each replaced
    state to the bytes of the new state.
    """
    known = sorted(_by_step(traced))
    removed = {
        storage
        for storage in traced.storages
        if not _is_idle(traced, storage)
        and _of_an_optimizer(storage)
        and _known_step(traced, storage, known) in sizes
    }
    state = StreamEvent(0, 0, 0, OUTSIDE, ALLOC, BEFORE, OPTIMIZER_STATE, 0)
    new = StorageLifetime(state, BEFORE_TRACE, traced.length)
    return traced.with_storages(
        {}, [new.changed(size=round(size)) for size in sizes.values()], removed
    )


def _known_step(traced: TracedStep, storage: StorageLifetime, known: Sequence[int]) -> int:
    """Return the key of the storage's optimizer in `_by_step`. ``known`` has all keys, sorted.

    One optimizer can step several times in a row, for example the optimizer of a critic. If a step has no key
    of its own, the nearest earlier key counts.
    """
    step = traced.optimizer_step_at(
        storage.classified_at if storage.category == OPTIMIZER_STATE else storage.begin
    )
    return known[max(bisect_right(known, step) - 1, 0)]


class _Whole(NamedTuple):
    """Storages of one optimizer's state: ``values`` storages for each parameter in ``keys``."""

    values: int
    size: int
    """Bytes of all values together."""
    keys: frozenset[ParameterKey]


def _by_step(traced: TracedStep) -> dict[int, Counter[ParameterKey]]:
    """Count the storages of optimizer state, by the optimizer step that last recorded their category."""
    smallest = _smallest(traced)
    by_step: dict[int, Counter[ParameterKey]] = {}
    for storage in traced.storages:
        if _is_in_use(traced, storage) and storage.size > smallest:
            kept = by_step.setdefault(traced.optimizer_step_at(storage.classified_at), Counter())
            kept[storage.key] += 1
    return dict(sorted(by_step.items()))


def _value_bytes(traced: TracedStep, step: int) -> int:
    """Return the bytes per value of a state: 2 if most of its bytes are bfloat16 or float16, else 4."""
    half = Counter[bool]()
    for storage in traced.storages:
        if _is_in_use(traced, storage) and traced.optimizer_step_at(storage.classified_at) == step:
            half[storage.uses.type == HALF_NOW] += storage.size
    return 2 if half[True] > half[False] else 4


def _smallest(traced: TracedStep) -> int:
    return _COUNTERS if traced.trace.result.device == "cpu" else _ALLOCATOR_BLOCK


def _stepped(traced: TracedStep) -> Counter[ParameterKey]:
    """Count the parameters that have gradients."""
    smallest = _smallest(traced)
    gradients = {storage.key for storage in traced.storages if storage.category == GRADIENT}
    keys = (
        storage.key
        for storage in traced.storages
        if storage.category == PARAMETER and storage.size > smallest
    )
    return Counter(key for key in keys if key in gradients)


def _whole_values(kept: Counter[ParameterKey], stepped: Counter[ParameterKey]) -> _Whole | None:
    """Group parameters by the number of state storages for each parameter. Return the largest group.

    ``kept`` counts the storages, and ``stepped`` counts the parameters. In Adam, the number is two. If the
    number is not whole, the parameter is in no group. If the largest group has less than `_ALMOST_ALL` of the
    state's bytes, return ``None``.
    """
    sizes, keys = Counter[int](), dict[int, set[ParameterKey]]()
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


def _of_layers(counts: Counter[ParameterKey], layers: AbstractSet[int]) -> Counter[ParameterKey]:
    return Counter(
        {key: count for key, count in counts.items() if key.layer in layers or OUTSIDE in layers}
    )


def _candidates(
    step: int, groups: Mapping[int, Counter[ParameterKey]], stepped: Counter[ParameterKey]
) -> Counter[ParameterKey]:
    """Return the parameters for which the optimizer of step ``step`` may keep state."""
    layers = {key.layer for key in groups[step]}
    if OUTSIDE not in layers:
        return _of_layers(stepped, layers)
    # Some layers of this state are unknown. So all layers count, except those of other optimizers' states.
    others = {key.layer for other, kept in groups.items() if other != step for key in kept}
    rest = Counter({key: count for key, count in stepped.items() if key.layer not in others})
    return rest or stepped


def _by_size(counts: Counter[ParameterKey]) -> Counter[ParameterKey]:
    sizes = Counter[ParameterKey]()
    for key, count in counts.items():
        sizes[ParameterKey(OUTSIDE, key.size)] += count
    return sizes


def _bytes(counts: Counter[ParameterKey]) -> int:
    return sum(key.size * count for key, count in counts.items())


def _of_an_optimizer(storage: StorageLifetime) -> bool:
    """Return True for optimizer state and for temporaries of an optimizer step."""
    return (storage.phase == OPTIMIZER and storage.transient) or _is_state(storage)


def _is_in_use(traced: TracedStep, storage: StorageLifetime) -> bool:
    return _is_state(storage) and not _is_idle(traced, storage)


def _is_idle(traced: TracedStep, storage: StorageLifetime) -> bool:
    """Return True for state of an optimizer that did not step.

    If no optimizer stepped, or the step begins with an optimizer's (``optimizer.step(closure)``), it is
    unknown, and the result is False.
    """
    if not traced.optimizer_steps or traced.optimizer_steps[0].begin <= traced.first_activity:
        return False
    known_before = storage.begin == BEFORE_TRACE and storage.classified_at < traced.first_activity
    return _is_state(storage) and known_before


def _is_state(storage: StorageLifetime) -> bool:
    return storage.category == OPTIMIZER_STATE and storage.phase in (BEFORE, OPTIMIZER)

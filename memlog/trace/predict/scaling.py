"""A traced step with a part of the batch, and with gradients accumulated over several batches."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable

from memlog.trace.encoding import (
    BACKWARD,
    FORWARD,
    GRADIENT,
    INPUT,
    OTHER,
    OUTSIDE,
    RECOMPUTE,
    TEMPORARY,
)
from memlog.trace.predict.lifetimes import ParameterKey, StorageLifetime, TracedStep
from memlog.trace.predict.lstms_on_cpu import LstmsOnCpu
from memlog.trace.predict.precision import PRODUCTS
from memlog.trace.records import HALF_NOW, NOTHING_KNOWN, UNKNOWN_TYPE

_COPIES = 4.1
"""Bytes of oneDNN's largest buffers for a convolution's weight / bytes of the weight.

With 3 x 3 weights and small images, the transformed weight is four times as large (Winograd's algorithm)."""


def scaled(traced: TracedStep, parts: int, *, whole_inputs: bool = False) -> TracedStep:
    """Return the step with one of ``parts`` equal parts of the batch.

    Inputs shrink with the batch. Activations and temporaries of forward and backward passes shrink, too, with
    the unused ends of their blocks on CUDA. Gradients of parameters and copies of parameters keep their size.

    Args:
        traced: The step with the whole batch.
        parts: Number of parts.
        whole_inputs: True if the program keeps the whole batch, and the parts are views of it. This holds for
            inputs that no module has made.
    """
    weights = _convolution_weights(traced)
    lstms = LstmsOnCpu(traced)
    copies = _copies(traced, lstms)
    smaller = {
        storage: storage.changed(
            size=_part(
                storage, parts, weights.get(storage.layer, 0), lstms.in_workspaces.get(storage, 0)
            )
        )
        for storage in traced.storages
        if storage.category == INPUT
        or (
            (storage.transient or storage.category == OTHER)
            and storage.phase in (FORWARD, BACKWARD, RECOMPUTE)
            and storage.size not in copies.get((storage.layer, storage.phase), ())
        )
    }
    others = [
        whole.changed(size=whole.size - part.size, uses=NOTHING_KNOWN)
        for whole, part in smaller.items()
        if whole_inputs and whole.category == INPUT and whole.layer == OUTSIDE
    ]
    return traced.with_storages(smaller, others)


def _convolution_weights(traced: TracedStep) -> dict[int, int]:
    """Return the bytes of each convolution's weight on the CPU, by layer."""
    if traced.trace.result.device != "cpu":
        return {}
    return {
        layer: max(sizes)
        for layer, sizes in traced.parameters().items()
        if traced.kind(layer).startswith("Conv")
    }


def _part(storage: StorageLifetime, parts: int, weight: int, fixed: int) -> int:
    """Return the bytes that a storage takes for one of ``parts`` parts of the batch.

    Inside a convolution on the CPU, oneDNN holds a copy of the weight beside copies of the input and the
    result. Its backward pass needs them one after the other.
    ``weight`` is the weight's size in bytes; 0: the storage's layer is no such convolution.
    ``fixed`` is the number of bytes that do not depend on the batch.
    """
    if storage.category == TEMPORARY and weight and storage.phase != BACKWARD:
        fixed = weight
    fixed = min(storage.size, fixed)
    part = fixed + round((storage.size - fixed) / parts)
    if storage.category != TEMPORARY or not weight or storage.phase != BACKWARD:
        return part
    return storage.size if storage.size <= _COPIES * weight else max(part, weight)


def accumulating(traced: TracedStep) -> TracedStep:
    """Return the step of a batch to whose gradients those of earlier batches are added.

    It stands for the second batch and each later one. During these batches, the accumulated gradients are
    live, and the gradients of the previous step are freed. A new gradient is live until the backward pass has
    added the new gradient to the accumulated gradient.
    """
    gradients = [
        storage
        for storage in traced.storages
        if storage.category == GRADIENT and storage.phase == BACKWARD
    ]
    before = [
        one.changed(begin=traced.between_steps(one.begin).begin, end=one.begin) for one in gradients
    ]
    new = [one.changed(end=_added_at(traced, one)) for one in gradients]
    replaced = {one: one.changed(end=end) for one, end in _replaced(traced, gradients).items()}
    return traced.with_storages(replaced, [*before, *new])


def _added_at(traced: TracedStep, gradient: StorageLifetime) -> int:
    """Return the moment at which the backward pass adds a gradient to the accumulated one.

    The trace of a CPU has this moment: the gradient becomes its parameter's. A trace of a GPU has only the
    end of the module's backward pass.
    """
    end = min(traced.next_phase_change(gradient.begin), gradient.end)
    return min(gradient.classified_at, end) if gradient.classified_at > gradient.begin else end


def _replaced(
    traced: TracedStep, gradients: Iterable[StorageLifetime]
) -> dict[StorageLifetime, int]:
    """Return new ends for the gradients of an earlier step, because accumulated gradients replace them.

    The program freed these gradients before the backward pass allocated new gradients.
    """
    times: dict[ParameterKey, list[tuple[int, int]]] = {}
    for storage in gradients:
        time = traced.between_steps(storage.begin).begin, storage.begin
        times.setdefault(storage.key, []).append(time)
    found = {}
    for storage in traced.storages:
        if storage.category == GRADIENT:
            for begin, end in times.get(storage.key, ()):
                if storage.begin < end and begin < storage.end <= end:
                    found[storage] = max(begin, storage.begin)
                    break
    return found


def _copies(traced: TracedStep, lstms: LstmsOnCpu) -> dict[tuple[int, int], set[int]]:
    """Return the sizes of copies of parameters, and of gradients of parameters, by layer and phase.

    These storages do not shrink with the batch. If the traced step used autocast, a copy and the copy's
    gradient have half the parameter's size. A gradient that is added to another gradient has the parameter's
    full size. A layer of `PRODUCTS` that is called once per step has no such gradient. Neither has an LSTM
    of oneDNN.
    """
    found: dict[tuple[int, int], set[int]] = {}
    calls = Counter(
        (call.layer, traced.optimizer_step_at(call.begin))
        for call in traced.calls
        if call.phase == FORWARD
    )
    called = {layer for layer, _ in calls}
    types = {storage.uses.type for storage in traced.storages}
    may_be_half = HALF_NOW in types or types == {UNKNOWN_TYPE}
    repeated = {layer for (layer, _), count in calls.items() if count > 1}
    for layer, sizes in traced.parameters().items():
        halves = {size // 2 for size in sizes} if may_be_half else set()
        found[layer, FORWARD] = found[layer, RECOMPUTE] = halves | lstms.kept.get(layer, set())
        is_product = layer in lstms.kept or traced.kind(layer) in PRODUCTS
        once = layer in called - repeated and is_product
        found[layer, BACKWARD] = halves if once else halves | set(sizes)
    return found

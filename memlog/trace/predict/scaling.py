"""Prediction of the peak with half the batch, and with gradients accumulated over several batches."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable

from memlog.trace.encoding import BACKWARD, FORWARD, GRADIENT, INPUT, RECOMPUTE
from memlog.trace.predict.lifetimes import (
    ParameterKey,
    SizedInterval,
    StorageLifetime,
    TracedStep,
    highest,
)
from memlog.trace.predict.precision import PRODUCTS


def steady_peak(traced: TracedStep) -> int:
    """Compute the peak in bytes of a step in which the optimizer's state exists from the start."""
    return highest(traced.intervals(), traced.length)


def with_half_batch(traced: TracedStep) -> int:
    """Compute the peak in bytes with half the batch.

    Inputs shrink with the batch. Activations and temporaries of forward and backward passes shrink, too.
    Gradients of parameters and copies of parameters keep their size.
    """
    return highest(traced.intervals(_sizes_with_half_batch(traced)), traced.length)


def accumulated(traced: TracedStep) -> int:
    """Compute the peak in bytes with half the batch, if gradients are accumulated over several batches.

    The result is the peak of the second batch and of each later batch. During these batches, the accumulated
    gradients are live, and the gradients of the previous step are freed. A new gradient is live until the
    backward pass has added the new gradient to the accumulated gradient.
    """
    gradients = [
        storage
        for storage in traced.storages
        if storage.category == GRADIENT and storage.phase == BACKWARD
    ]
    accumulated_before = [
        SizedInterval(traced.between_steps(one.begin).begin, one.begin, one.size)
        for one in gradients
    ]
    new = [
        SizedInterval(one.begin, min(traced.next_phase_change(one.begin), one.end), one.size)
        for one in gradients
    ]
    others = traced.intervals(_sizes_with_half_batch(traced), _replaced(traced, gradients))
    return highest([*others, *accumulated_before, *new], traced.length)


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


def _sizes_with_half_batch(traced: TracedStep) -> dict[StorageLifetime, float]:
    """Return the halved bytes of each storage that shrinks with the batch."""
    copies = _copies(traced)
    return {
        storage: storage.size / 2
        for storage in traced.storages
        if storage.category == INPUT
        or (
            storage.transient
            and storage.phase in (FORWARD, BACKWARD, RECOMPUTE)
            and storage.size not in copies.get((storage.layer, storage.phase), ())
        )
    }


def _copies(traced: TracedStep) -> dict[tuple[int, int], set[int]]:
    """Return the sizes of copies of parameters, and of gradients of parameters, by layer and phase.

    These storages do not shrink with the batch. Under autocast, a copy and the copy's gradient have half the
    parameter's size. A gradient that is added to another gradient has the parameter's full size. A layer of
    `PRODUCTS` that is called once per step has no such gradient.
    """
    found: dict[tuple[int, int], set[int]] = {}
    calls = Counter(
        (call.layer, traced.optimizer_step_at(call.begin))
        for call in traced.calls
        if call.phase == FORWARD
    )
    called = {layer for layer, _ in calls}
    repeated = {layer for (layer, _), count in calls.items() if count > 1}
    for layer, sizes in traced.parameters().items():
        halves = {size // 2 for size in sizes}
        found[layer, FORWARD] = found[layer, RECOMPUTE] = halves
        once = layer in called - repeated and traced.kind(layer) in PRODUCTS
        found[layer, BACKWARD] = halves if once else halves | set(sizes)
    return found

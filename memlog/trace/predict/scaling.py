"""A traced step with a part of the batch, with accumulated gradients, and under bfloat16 autocast.

oneDNN runs one layer of an LSTM in one direction at a time, each in one workspace. The forward pass has a
copy of the weights there, and the backward pass also copies some of their gradients (measured on x86 with
AVX-512).

Under autocast, matrix products and convolutions compute with two bytes per value instead of four. Their
results have two bytes per value, too. Other operations keep the type of their input. Parameters keep their
type. Autocast makes a bfloat16 copy of each parameter that a product uses. The copy lives as long as the
backward pass needs it. Results of the loss keep four bytes per value.

The prediction needs the type of each storage (`memlog.tracer.engines.autocast_types`). Only a trace that
memlog recorded operation by operation holds these types. The recording assumes that each parameter is used by
a product or a norm. So memlog predicts a peak only if all parameters and buffers belong to layers of torch
whose operations are known.
"""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from math import isqrt
from typing import NamedTuple

from memlog.trace.encoding import (
    BACKWARD,
    BUFFER,
    FORWARD,
    GRADIENT,
    INPUT,
    OTHER,
    OUTSIDE,
    PARAMETER,
    RECOMPUTE,
    TEMPORARY,
    UNDECIDED,
)
from memlog.trace.predict.lifetimes import (
    BEFORE_TRACE,
    Interval,
    ParameterKey,
    StorageLifetime,
    TracedStep,
)
from memlog.trace.records import (
    HALF,
    HALF_BY_SLOW_CONVOLUTION,
    HALF_NOW,
    NOTHING_KNOWN,
    UNKNOWN_TYPE,
    WIDE,
)

_GATES = 4
_VALUE = 4
"""Bytes of a value; oneDNN's other types are not in traces as `_weights` expects them."""
_LONG_ROW, _BLOCK = 256, 16
"""Divisors of the length of a weight's row. The backward pass copies the weight's gradient if the length is a
multiple of the first, or no multiple of the second."""


class _Weights(NamedTuple):
    """Bytes of the weights of one layer in one direction."""

    of_input: int
    of_state: int

    @property
    def biases(self) -> int:
        """Bytes of one bias, which has one value for each gate of each state."""
        return _GATES * _VALUE * isqrt(self.of_state // (_GATES * _VALUE))

    def in_workspace(self, phase: int) -> int:
        """Return the bytes of the copies in the workspace of a forward or backward pass."""
        rows = {size: size // self.biases for size in self}
        twice = [size for size in self if rows[size] % _LONG_ROW == 0 or rows[size] % _BLOCK]
        return sum(self) + (sum(twice) if phase == BACKWARD else 0)


class LstmsOnCpu:
    """LSTMs of a step that oneDNN runs.

    Packed sequences and LSTMs with projections have other kernels of torch, without such workspaces.

    Attributes:
        in_workspaces: Bytes of the copies in each workspace.
        kept: Bytes of each copy that the forward pass keeps, by layer. Only LSTMs without biases keep copies.
    """

    def __init__(self, traced: TracedStep) -> None:
        self.in_workspaces: dict[StorageLifetime, int] = {}
        self.kept: dict[int, set[int]] = {}
        if traced.trace.result.device != "cpu":
            return
        inside: dict[tuple[int, int], list[StorageLifetime]] = {}
        for storage in traced.storages:
            if storage.category == TEMPORARY and traced.kind(storage.layer) == "LSTM":
                inside.setdefault((storage.layer, storage.phase), []).append(storage)
        parameters = traced.parameters()
        for (layer, phase), storages in inside.items():
            sizes = parameters.get(layer, ())
            weights = _weights(sizes)
            copies = [pair.in_workspace(phase) for pair in weights]
            large = [storage for storage in storages if copies and storage.size > min(copies)]
            if not large:
                continue
            # The backward pass runs the layers from the last to the first.
            in_order = copies[::-1] if phase == BACKWARD else copies
            if len(large) % len(copies):  # some are not workspaces, and which ones is unknown
                in_order = [min(copies)]
            self.in_workspaces |= zip(large, itertools.cycle(in_order), strict=False)
            self.kept[layer] = set() if weights[0].biases in sizes else set(sizes)


def _weights(sizes: Sequence[int]) -> list[_Weights]:
    """Return the weights among an LSTM's parameters, in their order; empty if they are not as expected."""
    if len(sizes) < len(_Weights._fields):
        return []
    biases = _Weights(sizes[0], sizes[1]).biases
    per_layer = 4 if list(sizes[2:4]) == [biases, biases] else 2
    if len(sizes) % per_layer or not biases:
        return []
    weights = [_Weights(*sizes[at : at + 2]) for at in range(0, len(sizes), per_layer)]
    return weights if all(pair.of_state == sizes[1] for pair in weights) else []


_HALF = 0.5
_NAMED = 6
"""Maximum number of layer classes that a sentence lists."""
PRODUCTS = frozenset(
    (
        "Linear",
        "NonDynamicallyQuantizableLinear",  # inside MultiheadAttention
        "MultiheadAttention",
        *(f"Conv{dimensions}d" for dimensions in (1, 2, 3)),
        *(f"ConvTranspose{dimensions}d" for dimensions in (1, 2, 3)),
    )
)
"""Classes of layers that multiply matrices or convolve."""
_OTHERS = frozenset(
    (
        "Embedding",
        "EmbeddingBag",
        "LayerNorm",
        "GroupNorm",
        "SyncBatchNorm",
        *(f"BatchNorm{dimensions}d" for dimensions in (1, 2, 3)),
        *(f"InstanceNorm{dimensions}d" for dimensions in (1, 2, 3)),
    )
)
"""Classes of layers whose parameters autocast does not copy. Their results have the type of their input, or
float32. RMSNorm is missing, because the type of its result on a GPU depends on torch's version. LSTM, GRU and
RNN are missing, because the storages that these layers keep depend on the library that runs them."""


def with_autocast(traced: TracedStep) -> TracedStep | None:
    """Return the step under bfloat16 autocast.

    Return ``None`` if `why_not` returns a reason, if the step used autocast, or if autocast casts nothing.
    """
    if (
        why_not(traced) is not None
        or _is_on(traced)
        or not any(storage.uses.cast_first for storage in traced.storages)
    ):
        return None
    casts = {storage: _cast(traced, storage) for storage in traced.storages}
    return traced.with_storages(
        {storage: own for storage, (own, _) in casts.items()},
        [copy for _, copies in casts.values() for copy in copies] + list(_copied_results(traced)),
    )


def why_not(traced: TracedStep) -> str | None:
    """Return the reason why no prediction is possible; ``None`` if a prediction is possible.

    The reason is text for the end of a sentence.
    """
    unknown = _unknown_kinds(traced)
    if unknown:
        named = ", ".join(unknown[:_NAMED])
        return f"{named} may use parameters or buffers in float32, which makes what follows float32 again"
    if all(storage.uses.type == UNKNOWN_TYPE for storage in traced.storages):
        return (
            "this trace has no types of storages (traces of a GPU or of an older memlog have none)"
        )
    if any(storage.uses.type == HALF_BY_SLOW_CONVOLUTION for storage in traced.storages):
        return (
            "the processor of the traced step has no instructions for bfloat16 convolutions (on x86: "
            "AVX-512), and torch's replacement needs buffers that can be larger than what autocast saves"
        )
    return None


def _is_on(traced: TracedStep) -> bool:
    """Return True if the traced forward pass allocated storages with two bytes per value."""
    return any(
        storage.uses.type == HALF_NOW and storage.phase == FORWARD for storage in traced.storages
    )


def _unknown_kinds(traced: TracedStep) -> list[str]:
    """Return the classes of layers that hold parameters or buffers, but whose operations are unknown."""
    holding = {
        storage.layer for storage in traced.storages if storage.category in (PARAMETER, BUFFER)
    }
    kinds = {traced.kind(layer) or "what is in no module" for layer in holding}
    return sorted(kinds - PRODUCTS - _OTHERS)


def _cast(
    traced: TracedStep, storage: StorageLifetime
) -> tuple[StorageLifetime, list[StorageLifetime]]:
    """Return a storage as it is under autocast, and its copies."""
    end, uses = storage.end, storage.uses
    if uses.type == HALF and _varies(storage) and "Loss" not in traced.kind(storage.layer):
        return storage.changed(size=round(storage.size * _HALF)), []
    if not uses.cast_first or uses.type != WIDE:
        return storage, []
    first = traced.allocated_after(uses.cast_first)
    # One moment later, because an interval's end does not belong to it.
    last = traced.allocated_after(uses.cast_last) + 1
    in_backward = traced.backward_after(first) < last
    until, copies = last, max(uses.casts, 1)
    is_parameter = storage.category == PARAMETER
    if is_parameter:
        # The whole forward pass uses one copy, which lives until the backward pass no longer needs it.
        until, copies = max(last, min(traced.backward_after(first), traced.length)), 1
    intervals = list(_between_steps(traced, first, until))
    copy = storage.changed(
        phase=FORWARD, category=UNDECIDED, uses=NOTHING_KNOWN, cached=is_parameter
    )
    size = round(storage.size * _HALF) * -(-copies // max(len(intervals), 1))
    freed_early = storage.transient or (
        _varies(storage) and _ends_in_first_backward(traced, storage, first)
    )
    if freed_early and in_backward and uses.used < uses.cast_last:
        end = min(end, max(first, traced.allocated_after(uses.used)) + 1)
    return storage.changed(end=end), [
        copy.changed(begin=begin, end=end, size=size) for begin, end in intervals
    ]


def _ends_in_first_backward(traced: TracedStep, storage: StorageLifetime, at: int) -> bool:
    """Return True if a storage is freed in the first backward pass after ``at``.

    The result is False for a model's input that the program keeps.
    """
    backward = traced.backward_after(at)
    changes = traced.phase_changes_from(backward)
    end = next((change.at for change in changes if change.phase != BACKWARD), traced.length)
    return backward < storage.end <= end


def _between_steps(traced: TracedStep, first: int, last: int) -> Iterator[Interval]:
    """Yield the parts of an interval that lie outside optimizer steps.

    Autocast's copies of parameters exist only in these parts, because no copy lives during an optimizer step.
    """
    for step in traced.optimizer_steps[traced.optimizer_step_at(first) :]:
        if step.begin >= last:
            break
        if first < step.begin:
            yield Interval(first, step.begin)
        first = max(first, step.end)
    if first < last:
        yield Interval(first, last)


def _copied_results(traced: TracedStep) -> Iterator[StorageLifetime]:
    """Yield the float32 copies of the models' results. Losses use these copies."""
    inputs = {storage for call in traced.outermost_calls() for storage in call.inputs or ()}
    for call in traced.outermost_calls():
        left = [
            storage
            for storage in traced.allocated_during(call)
            if storage.end > call.end and _varies(storage)
        ]
        if left and left[-1].uses.type == HALF and left[-1] not in inputs:
            yield _widened(traced, left[-1], call.end)


def _varies(storage: StorageLifetime) -> bool:
    """Return True if each pass allocates the storage anew.

    This is true for activations and temporaries. It is also true for a model's input that was made during the
    step, for example by another model.
    """
    return storage.transient or (storage.category == INPUT and storage.begin > BEFORE_TRACE)


def _widened(traced: TracedStep, result: StorageLifetime, at: int) -> StorageLifetime:
    """Return a result's float32 copy, with the bytes that this copy adds."""
    copy = result.changed(begin=at, uses=NOTHING_KNOWN, layer=OUTSIDE)
    used = traced.allocated_after(result.uses.used)
    if result.uses.used and used < traced.backward_after(at):
        # The loss (cross entropy) does not keep the result for the backward pass.
        return copy.changed(end=max(at, used) + 1)
    # A layer of `PRODUCTS` does not keep its result for the backward pass. So the float32 copy replaces the
    # half-precision result, and only the difference of the two sizes is added.
    alone = traced.kind(result.layer) in PRODUCTS
    size = round(result.size * (_HALF if alone else 1.0))
    return copy.changed(end=_backward_into(traced, at), size=size)


def _backward_into(traced: TracedStep, at: int) -> int:
    """Return the first moment after ``at`` at which a backward pass enters a layer."""
    changes = traced.phase_changes_from(at)
    inside = (
        change.at for change in changes if change.phase == BACKWARD and change.layer != OUTSIDE
    )
    return next(inside, traced.length)


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
        gradient.changed(begin=traced.between_steps(gradient.begin).begin, end=gradient.begin)
        for gradient in gradients
    ]
    new = [gradient.changed(end=_added_at(traced, gradient)) for gradient in gradients]
    replaced = {
        gradient: gradient.changed(end=end)
        for gradient, end in _replaced(traced, gradients).items()
    }
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
    ends = {}
    for storage in traced.storages:
        if storage.category == GRADIENT:
            for begin, end in times.get(storage.key, ()):
                if storage.begin < end and begin < storage.end <= end:
                    ends[storage] = max(begin, storage.begin)
                    break
    return ends


def _copies(traced: TracedStep, lstms: LstmsOnCpu) -> dict[tuple[int, int], set[int]]:
    """Return the sizes of copies of parameters, and of gradients of parameters, by layer and phase.

    These storages do not shrink with the batch. If the traced step used autocast, a copy and the copy's
    gradient have half the parameter's size. A gradient that is added to another gradient has the parameter's
    full size. A layer of `PRODUCTS` that is called once per step has no such gradient. Neither has an LSTM
    of oneDNN.
    """
    copies: dict[tuple[int, int], set[int]] = {}
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
        copies[layer, FORWARD] = copies[layer, RECOMPUTE] = halves | lstms.kept.get(layer, set())
        is_product = layer in lstms.kept or traced.kind(layer) in PRODUCTS
        once = layer in called - repeated and is_product
        copies[layer, BACKWARD] = halves if once else halves | set(sizes)
    return copies

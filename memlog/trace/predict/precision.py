"""A traced step under bfloat16 autocast.

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

from collections.abc import Iterator

from memlog.trace.encoding import (
    BACKWARD,
    BUFFER,
    FORWARD,
    INPUT,
    OUTSIDE,
    PARAMETER,
    UNDECIDED,
)
from memlog.trace.predict.lifetimes import BEFORE_TRACE, Interval, StorageLifetime, TracedStep
from memlog.trace.records import (
    HALF,
    HALF_BY_SLOW_CONVOLUTION,
    HALF_NOW,
    NOTHING_KNOWN,
    UNKNOWN_TYPE,
    WIDE,
)

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
    inside = (one.at for one in changes if one.phase == BACKWARD and one.layer != OUTSIDE)
    return next(inside, traced.length)

"""Prediction of the modules to checkpoint, and of the peak if they are checkpointed.

A checkpointed module keeps its inputs and nothing else. It keeps the inputs even if the module's first
operation (such as ReLU, dropout or pooling) would free them at once. All other storages that the module's
forward keeps for the backward pass are freed at the end of the forward. When the backward pass reaches the
module, the forward runs a second time. The second forward allocates these storages and the temporaries again.

A moment is the index of an event in the trace's stream.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple, TypeAlias

from memlog.trace.encoding import BACKWARD, FORWARD, RECOMPUTE
from memlog.trace.predict.lifetimes import (
    LayerCall,
    SizedInterval,
    StorageLifetime,
    TracedStep,
    highest,
)

_MIN_SHARE = 0.02
"""If checkpointing a group of modules frees less than this fraction of the peak, memlog ignores the group."""
_MAX_GROUPS = 12
_RESULT_RATIO = 20
"""Maximum of: bytes of the largest storage that outlives a call / bytes of the call's result.

The newest storage that is large enough counts as the result. Smaller storages are, for example, statistics
that a norm allocates after its result.
"""
_RNG_STATE_BYTES = 5056
"""Bytes of the state of the CPU's random number generator. Each checkpointed call keeps this state."""
_SAME_PEAK = 1.005
"""Maximum ratio of two peaks that memlog treats as the same."""


class RecomputedCall(NamedTuple):
    """One call of a checkpointed module."""

    dropped: dict[StorageLifetime, int]
    """Storages that checkpointing frees in the forward pass, each with the moment of the free.

    `_last_reader_end` gives the moment for the call's result, `_forward_ends` for the other storages."""
    recompute_at: int
    """Moment at which the second forward begins."""
    recompute_bytes: float
    """Highest number of bytes that the second forward needs."""
    released_at: int
    """Moment at which the backward pass frees the last of the dropped storages."""
    inputs: tuple[StorageLifetime, ...]
    """Inputs of the call. Checkpointing keeps them until `released_at`."""
    forward_begin: int
    """Moment at which the first forward begins."""


_CallsByLayer: TypeAlias = dict[int, list[RecomputedCall]]


class CheckpointPlan(NamedTuple):
    """Modules to checkpoint, and the predicted peak in bytes."""

    modules: tuple[str, ...]
    peak: int


def running_statistics(traced: TracedStep, modules: Sequence[str]) -> list[str]:
    """Return the paths of the batch norms inside ``modules``.

    If these modules are checkpointed, each step updates the running statistics of these norms twice.
    """
    inside = tuple(f"{module}." for module in modules)
    return [
        path
        for layer, path in enumerate(traced.paths)
        if "BatchNorm" in traced.kind(layer) and path.startswith(inside)
    ]


def best_plan(traced: TracedStep, peak: int) -> CheckpointPlan | None:
    """Find the sibling modules whose checkpointing gives the lowest peak.

    Return ``None`` if no plan lowers ``peak``, which is the peak without checkpointing, in bytes.
    """
    calls = _recomputed_calls(traced)
    plans = [
        CheckpointPlan(_paths(traced, group), _peak(traced, calls, group))
        for group in _groups(traced, calls, peak)
    ]
    best = min(plans, key=lambda plan: (plan.peak, len(plan.modules)), default=None)
    if best is None or best.peak * _SAME_PEAK >= peak:
        return None
    return _without_last_module(traced, calls, best)


def peak_with_checkpointing(traced: TracedStep, modules: Sequence[str]) -> int:
    """Compute the peak in bytes if the modules with these paths are checkpointed."""
    calls = _recomputed_calls(traced)
    return _peak(traced, calls, [layer for layer in calls if traced.paths[layer] in modules])


def _without_last_module(
    traced: TracedStep, calls: _CallsByLayer, plan: CheckpointPlan
) -> CheckpointPlan:
    """Return ``plan`` without the last module if the peak stays the same, otherwise ``plan``.

    The backward pass begins at the last module. So the second forward of this module follows soon after the
    first one, and checkpointing this module seldom lowers the peak.
    """
    group = [layer for layer in calls if traced.paths[layer] in plan.modules]
    if len(group) > 1:
        last = min(group, key=lambda layer: calls[layer][0].recompute_at)
        fewer = tuple(layer for layer in group if layer != last)
        peak = _peak(traced, calls, fewer)
        if peak <= plan.peak * _SAME_PEAK:
            return CheckpointPlan(_paths(traced, fewer), peak)
    return plan


def _paths(traced: TracedStep, group: Sequence[int]) -> tuple[str, ...]:
    return tuple(traced.paths[layer] for layer in sorted(group))


def _groups(traced: TracedStep, calls: _CallsByLayer, peak: int) -> list[tuple[int, ...]]:
    """Return the groups of sibling modules whose checkpointing frees at least `_MIN_SHARE` of ``peak``.

    Return at most `_MAX_GROUPS` groups. The group that frees the most bytes comes first.
    """
    siblings: dict[str, list[int]] = {}
    for layer in calls:
        siblings.setdefault(traced.paths[layer].rpartition(".")[0], []).append(layer)
    dropped = {
        layer: sum(storage.size for call in of_layer for storage in call.dropped)
        for layer, of_layer in calls.items()
    }
    totals = {tuple(group): sum(dropped[layer] for layer in group) for group in siblings.values()}
    large = [group for group, total in totals.items() if total >= _MIN_SHARE * peak]
    return sorted(large, key=lambda group: -totals[group])[:_MAX_GROUPS]


def _recomputed_calls(traced: TracedStep) -> _CallsByLayer:
    """Return, by layer, the calls in which checkpointing would drop storages."""
    # A module whose forward runs again in the backward pass is checkpointed already.
    excluded = {
        call.layer for call in traced.calls if call.phase == RECOMPUTE or call.inputs is None
    }
    forward_ends = _forward_ends(traced)
    by_layer: _CallsByLayer = {}
    # From the last call to the first: the order in which the backward pass reaches them.
    for call in reversed(traced.calls):
        wanted = call.phase == FORWARD and call.layer > 1 and call.layer not in excluded
        # A norm keeps too little to be checkpointed alone.
        wanted = wanted and "Norm" not in traced.kind(call.layer)
        if wanted and not traced.paths[call.layer].startswith("("):
            later = by_layer.get(call.layer)
            recomputed = _recomputed_call(traced, forward_ends, call, later[-1] if later else None)
            if recomputed is not None:
                by_layer.setdefault(call.layer, []).append(recomputed)
    return by_layer


def _forward_ends(traced: TracedStep) -> dict[StorageLifetime, int]:
    """Return the moment at which checkpointing can free each storage that autograd keeps.

    The moment is the end of the forward that allocates the storage. If this forward returns the storage, the
    moment is the end of the next outer forward that does not return the storage.
    """
    ends: dict[StorageLifetime, int] = {}
    for call in traced.calls:  # inner calls end first
        if call.phase == FORWARD:
            left = [storage for storage in _transients(traced, call) if storage.end > call.end]
            result = _result(left)
            for storage in left:
                if storage.cached:
                    ends.setdefault(storage, traced.backward_after(call.end))
                elif storage is not result:
                    ends.setdefault(storage, call.end)
    return ends


def _transients(traced: TracedStep, call: LayerCall) -> list[StorageLifetime]:
    return [storage for storage in traced.allocated_during(call) if storage.transient]


def _recomputed_call(
    traced: TracedStep,
    forward_ends: dict[StorageLifetime, int],
    call: LayerCall,
    later: RecomputedCall | None,
) -> RecomputedCall | None:
    """Return the figures of a call under checkpointing; ``None`` if checkpointing would drop nothing.

    ``later`` is the next call of the same module. The backward pass reaches this next call first.
    """
    allocated = _transients(traced, call)
    left = [storage for storage in allocated if storage.end > call.end]
    result = _result(left)
    backward = traced.backward_after(call.end)
    dropped = {
        storage: forward_ends[storage]
        for storage in left
        if storage is not result and storage.end > backward
    }
    if not dropped:
        return None
    # The backward pass of another module frees what it got, such as the last state of a recurrent layer.
    inside = (0, *traced.subtree(call.layer))
    own = [storage.end for storage in dropped if storage.uses.backward_layer in inside]
    first_free = min(own, default=min(storage.end for storage in dropped))
    recompute_at = _backward_entry(traced, call, first_free)
    if later is not None and later.forward_begin < recompute_at < later.released_at:
        recompute_at = _entry_after(traced, later)
    if result is not None and result.uses.backward_layer in traced.subtree(call.layer):
        # The module itself kept its result, because its last operation needs it in the backward pass.
        dropped[result] = _last_reader_end(traced, call, result)
        result = None
    # The second forward allocates everything again, except a result that nothing inside the module needs.
    again = [
        SizedInterval(
            storage.begin - call.begin, min(storage.end, call.end) - call.begin, storage.size
        )
        for storage in allocated
        if storage is not result
    ]
    return RecomputedCall(
        dropped=dropped,
        recompute_at=recompute_at,
        recompute_bytes=highest(again, call.end - call.begin),
        released_at=max(storage.end for storage in dropped),
        inputs=call.inputs or (),
        forward_begin=call.begin,
    )


def _last_reader_end(traced: TracedStep, call: LayerCall, result: StorageLifetime) -> int:
    """Return the end of the last forward that reads the result; ``call.end`` if no forward reads it."""
    ends = (
        later.end
        for later in traced.calls
        if later.begin >= call.end and later.phase == FORWARD and result in (later.inputs or ())
    )
    return max(ends, default=call.end)


def _result(left: Sequence[StorageLifetime]) -> StorageLifetime | None:
    largest = max((storage.size for storage in left), default=0)
    return next(
        (storage for storage in reversed(left) if storage.size * _RESULT_RATIO >= largest), None
    )


def _backward_entry(traced: TracedStep, call: LayerCall, first_free: int) -> int:
    """Return the last moment before ``first_free`` at which the backward pass entered the module."""
    inside = traced.subtree(call.layer)
    entry = first_free
    for change in reversed(traced.phase_changes_before(first_free)):
        if change.phase != BACKWARD or change.layer not in inside:
            break
        entry = change.at
    return entry


def _entry_after(traced: TracedStep, later: RecomputedCall) -> int:
    """Return the moment after ``later`` at which the backward pass enters the recomputed module again.

    If the backward pass does not enter this module again, return the `released_at` of ``later``.
    """
    changes = traced.phase_changes_from(later.recompute_at)
    first = next((change for change in changes if change.phase == BACKWARD), None)
    if first is not None:
        for change in changes:
            if change.at >= later.released_at and change[1:] == first[1:]:
                return change.at
    return later.released_at


def _peak(traced: TracedStep, calls: _CallsByLayer, group: Sequence[int]) -> int:
    checkpointed = [call for layer in group for call in calls[layer]]
    ends = {storage: end for call in checkpointed for storage, end in call.dropped.items()}
    for call in checkpointed:
        for storage in call.inputs:
            ends[storage] = max(call.released_at, ends.get(storage, storage.end))
    intervals = traced.intervals(ends)
    for call in checkpointed:
        intervals += [
            SizedInterval(call.recompute_at, storage.end, storage.size) for storage in call.dropped
        ]
        if traced.trace.result.device == "cpu":
            intervals.append(SizedInterval(call.forward_begin, call.released_at, _RNG_STATE_BYTES))
    spikes = [(call.recompute_at, call.recompute_bytes) for call in checkpointed]
    return highest(intervals, traced.length, spikes)

"""Prediction of the modules to checkpoint, and of the peak with these checkpointed.

A checkpointed module keeps its inputs and nothing else. It keeps them even if its first operation would not
(ReLU, dropout and pooling free theirs at once). All else that its forward keeps for the backward pass is
freed at the end of the forward. When the backward pass reaches the module, the forward runs again and
allocates all of it again, with its temporaries.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple, TypeAlias

from memlog.trace.encoding import BACKWARD, FORWARD
from memlog.trace.predict.lifetimes import (
    START,
    Call,
    SizedInterval,
    StorageLifetime,
    TracedStep,
    highest,
    steady_begin,
)

_MIN_SHARE = 0.02
"""Smallest part of the peak that a group of modules must drop to be considered."""
_MAX_GROUPS = 12
_RESULT_RATIO = 20
"""A call's result is the newest storage that outlives the call. Storages that are more than this many times
smaller than the largest one do not count: a norm's statistics, which follow its result, are small."""
_RNG_STATE_BYTES = 5056
"""Bytes of the CPU random number generator's state, kept for each call (`torch.get_rng_state`)."""
_SAME_PEAK = 1.005
"""Peaks that differ by less than half a per cent count as the same."""


class RecomputedCall(NamedTuple):
    """One call of a checkpointed module."""

    dropped: dict[StorageLifetime, int]
    """Storages that are freed in the forward pass, and when: at the end of a call, or, for the call's result,
    when the modules that read it end."""
    recompute_at: int
    """When the forward runs again."""
    recompute_bytes: float
    """Highest number of bytes that the second forward needs."""
    released_at: int
    """When the backward pass frees the last of the dropped storages."""
    inputs: tuple[StorageLifetime, ...]
    """Storages that are kept until `released_at`."""
    forward_begin: int
    """When the forward runs first."""


_CallsByLayer: TypeAlias = dict[int, list[RecomputedCall]]


class Plan(NamedTuple):
    """Modules to checkpoint, and the predicted peak in bytes."""

    modules: tuple[str, ...]
    peak: int


def running_statistics(traced: TracedStep, modules: Sequence[str]) -> list[str]:
    """Return the batch norms inside ``modules``: a second forward updates their running statistics again."""
    inside = tuple(f"{module}." for module in modules)
    return [
        path
        for layer, path in enumerate(traced.trace.paths)
        if "BatchNorm" in traced.layers.kind(layer) and path.startswith(inside)
    ]


def best_plan(traced: TracedStep, peak: int) -> Plan | None:
    """Find the sibling modules whose checkpointing gives the lowest peak.

    ``None`` if no such plan lowers ``peak``, the peak in bytes without checkpointing.
    """
    calls = _recomputed_calls(traced)
    plans = [
        Plan(_paths(traced, group), _peak(traced, calls, group))
        for group in _groups(traced, calls, peak)
    ]
    best = min(plans, key=lambda plan: (plan.peak, len(plan.modules)), default=None)
    if best is None or best.peak * _SAME_PEAK >= peak:
        return None
    return _without_last_module(traced, calls, best)


def _without_last_module(traced: TracedStep, calls: _CallsByLayer, plan: Plan) -> Plan:
    """Drop the last module from a plan if that keeps the peak.

    The last module's forward runs again right after its first run, so checkpointing it seldom saves anything.
    """
    group = [layer for layer in calls if traced.layers.paths[layer] in plan.modules]
    if len(group) > 1:
        last = min(group, key=lambda layer: calls[layer][0].recompute_at)
        fewer = tuple(layer for layer in group if layer != last)
        peak = _peak(traced, calls, fewer)
        if peak <= plan.peak * _SAME_PEAK:
            return Plan(_paths(traced, fewer), peak)
    return plan


def _paths(traced: TracedStep, group: Sequence[int]) -> tuple[str, ...]:
    return tuple(traced.layers.paths[layer] for layer in sorted(group))


def _groups(traced: TracedStep, calls: _CallsByLayer, peak: int) -> list[tuple[int, ...]]:
    """Return groups of siblings that would drop much, those that drop most first."""
    siblings: dict[str, list[int]] = {}
    for layer in calls:
        siblings.setdefault(traced.layers.paths[layer].rpartition(".")[0], []).append(layer)
    dropped = {
        layer: sum(storage.size for call in of_layer for storage in call.dropped)
        for layer, of_layer in calls.items()
    }
    groups = [
        tuple(group)
        for group in siblings.values()
        if sum(dropped[layer] for layer in group) >= _MIN_SHARE * peak
    ]
    groups.sort(key=lambda group: -sum(dropped[layer] for layer in group))
    return groups[:_MAX_GROUPS]


def _recomputed_calls(traced: TracedStep) -> _CallsByLayer:
    """Return each layer's calls as checkpointing would change them, if they would drop anything."""
    if not traced.records_inputs:
        return {}
    excluded = traced.recomputed() | {call.layer for call in traced.calls if call.inputs is None}
    forward_ends = _forward_ends(traced)
    found: _CallsByLayer = {}
    # From the last call to the first: the order in which the backward pass reaches them.
    for call in reversed(traced.calls):
        wanted = call.phase == FORWARD and call.layer > 1 and call.layer not in excluded
        # A norm keeps too little to be checkpointed alone.
        wanted = wanted and "Norm" not in traced.layers.kind(call.layer)
        if wanted and not traced.layers.paths[call.layer].startswith("("):
            later = found.get(call.layer)
            recomputed = _recomputed_call(traced, forward_ends, call, later[-1] if later else None)
            if recomputed is not None:
                found.setdefault(call.layer, []).append(recomputed)
    return found


def _forward_ends(traced: TracedStep) -> dict[StorageLifetime, int]:
    """Return the storages that only autograd keeps, and when each would be freed otherwise.

    Without autograd, a storage that a module allocates and does not return is freed when that module's
    forward ends. The innermost such module counts.
    """
    found: dict[StorageLifetime, int] = {}
    for call in traced.calls:  # inner calls end first
        if call.phase == FORWARD:
            left = [storage for storage in _transients(traced, call) if storage.end > call.end]
            result = _result(left)
            for storage in left:
                if storage is not result:
                    found.setdefault(storage, call.end)
    return found


def _transients(traced: TracedStep, call: Call) -> list[StorageLifetime]:
    return [storage for storage in traced.allocated_during(call) if storage.transient]


def _recomputed_call(
    traced: TracedStep,
    forward_ends: dict[StorageLifetime, int],
    call: Call,
    later: RecomputedCall | None,
) -> RecomputedCall | None:
    """Return a call as checkpointing would change it; ``None`` if it would drop nothing.

    ``later`` is the next call of the same module, which the backward pass reaches first.
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
    recompute_at = _backward_entry(traced, call, min(storage.end for storage in dropped))
    if later is not None and later.forward_begin < recompute_at < later.released_at:
        recompute_at = _entry_after(traced, later)
    if result is not None and result.uses.backward_layer in traced.layers.subtree(call.layer):
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


def _last_reader_end(traced: TracedStep, call: Call, result: StorageLifetime) -> int:
    """Return the end of the last forward that gets the call's result."""
    ends = (
        later.end
        for later in traced.calls
        if later.begin >= call.end and later.phase == FORWARD and result in (later.inputs or ())
    )
    return max(ends, default=call.end)


def _result(left: Sequence[StorageLifetime]) -> StorageLifetime | None:
    """Return a call's result: the newest storage that outlives the call and is not too small."""
    largest = max((storage.size for storage in left), default=0)
    return next(
        (storage for storage in reversed(left) if storage.size * _RESULT_RATIO >= largest), None
    )


def _backward_entry(traced: TracedStep, call: Call, first_free: int) -> int:
    """Return when the backward pass enters the call's module for the last time before ``first_free``."""
    inside = traced.layers.subtree(call.layer)
    entry = first_free
    for change in reversed(traced.phase_changes_before(first_free)):
        if change.phase != BACKWARD or change.layer not in inside:
            break
        entry = change.at
    return entry


def _entry_after(traced: TracedStep, later: RecomputedCall) -> int:
    """Return when the backward pass enters a module again, after it has finished a later call of the module.

    The pass enters both calls at the same layer: the one that ran last in their forward.
    """
    changes = traced.phase_changes_from(later.recompute_at)
    first = next((change for change in changes if change.phase == BACKWARD), None)
    if first is not None:
        for change in changes:
            if change.at >= later.released_at and change[1:] == first[1:]:
                return change.at
    return later.released_at


def _peak(traced: TracedStep, calls: _CallsByLayer, group: Sequence[int]) -> int:
    """Compute the peak if the modules of a group are checkpointed, in bytes."""
    checkpointed = [call for layer in group for call in calls[layer]]
    kept: dict[StorageLifetime, int] = {}
    for call in checkpointed:
        for storage in call.inputs:
            kept[storage] = max(call.released_at, kept.get(storage, START))
    ends = {storage: end for call in checkpointed for storage, end in call.dropped.items()}
    intervals = []
    for storage in traced.storages:
        end = max(ends.get(storage, storage.end), kept.get(storage, START))
        intervals.append(SizedInterval(steady_begin(storage), end, storage.size))
    for call in checkpointed:
        intervals += [
            SizedInterval(call.recompute_at, storage.end, storage.size) for storage in call.dropped
        ]
        if traced.trace.result.device == "cpu":
            intervals.append(SizedInterval(call.forward_begin, call.released_at, _RNG_STATE_BYTES))
    spikes = [(call.recompute_at, call.recompute_bytes) for call in checkpointed]
    return highest(intervals, traced.length, spikes)

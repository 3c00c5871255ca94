"""Checkpointing: which modules, and what it would save.

A checkpointed module keeps its inputs alone, also where its first operation would not: those of ReLU,
dropout or pooling are gone at once without it. What its forward keeps for the backward pass is gone at its
end, and is made again (with all that its forward needs on the way) as the backward pass comes to it.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from memlog.trace.encoding import BACKWARD, FORWARD
from memlog.trace.predict.lifetimes import (
    START,
    Call,
    Course,
    Span,
    StorageLifetime,
    highest,
    steady_begin,
)

_WORTH = 0.02
"""A group of modules is looked at where what they drop is such a part of the peak."""
_MOST_GROUPS = 12
_RESULT = 20
"""A module's result is the last storage that is not this many times smaller than its largest: what comes
after it (a norm's statistics) is small."""
_RANDOM_STATE = 5056
"""Bytes of the CPU's random number generator's state, which is kept for each call (`torch.get_rng_state`)."""
_SAME = 1.005
"""Peaks within half a per cent are the same."""


class Replay(NamedTuple):
    """One call of a checkpointed module."""

    dropped: dict[StorageLifetime, int]
    """What is gone, and when: at the end of the call, or a result once it has been passed on."""
    again: int
    """When the forward runs again."""
    spike: float
    """Bytes that this needs at most."""
    done: int
    """When the last of it is freed in the backward pass."""
    inputs: tuple[StorageLifetime, ...]
    """What is kept until then."""
    begins: int
    """When the forward ran first."""


class Plan(NamedTuple):
    """Modules to checkpoint, and the peak with that."""

    modules: tuple[str, ...]
    peak: int


def is_norm(kind: str) -> bool:
    """Whether a kind of layer normalises: one by itself is never checkpointed, for it keeps little."""
    return "Norm" in kind


def running_statistics(course: Course, modules: Sequence[str]) -> list[str]:
    """Layers inside modules that update their statistics again when their forward runs again."""
    inside = tuple(f"{module}." for module in modules)
    return [
        path
        for layer, path in enumerate(course.trace.paths)
        if "BatchNorm" in course.kind(layer) and path.startswith(inside)
    ]


def best_plan(course: Course, peak: int) -> Plan | None:
    """The siblings whose checkpointing gives the lowest peak; ``None`` where none lowers it.

    Args:
        course: Of the traced step.
        peak: Without it.
    """
    replays = _replays(course)
    plans = [
        Plan(_paths(course, group), _peak(course, replays, group))
        for group in _groups(course, replays, peak)
    ]
    best = min(plans, key=lambda plan: (plan.peak, len(plan.modules)), default=None)
    if best is None or best.peak * _SAME >= peak:
        return None
    return _without_the_last(course, replays, best)


def _without_the_last(course: Course, replays: dict[int, list[Replay]], plan: Plan) -> Plan:
    """The last module of all runs again at once, which seldom saves anything: then it need not."""
    group = [layer for layer in replays if course.path(layer) in plan.modules]
    if len(group) > 1:
        last = min(group, key=lambda layer: replays[layer][0].again)
        fewer = tuple(layer for layer in group if layer != last)
        peak = _peak(course, replays, fewer)
        if peak <= plan.peak * _SAME:
            return Plan(_paths(course, fewer), peak)
    return plan


def _paths(course: Course, group: Sequence[int]) -> tuple[str, ...]:
    return tuple(course.path(layer) for layer in sorted(group))


def _groups(course: Course, replays: dict[int, list[Replay]], peak: int) -> list[tuple[int, ...]]:
    """Siblings that keep much, those that keep most first."""
    siblings: dict[str, list[int]] = {}
    for layer in replays:
        siblings.setdefault(course.path(layer).rpartition(".")[0], []).append(layer)
    kept = {
        layer: sum(life.size for replay in of_one for life in replay.dropped)
        for layer, of_one in replays.items()
    }
    worth = [
        tuple(group)
        for group in siblings.values()
        if sum(kept[layer] for layer in group) >= _WORTH * peak
    ]
    worth.sort(key=lambda group: -sum(kept[layer] for layer in group))
    return worth[:_MOST_GROUPS]


def _replays(course: Course) -> dict[int, list[Replay]]:
    """By layer, its calls were it checkpointed; without those that would drop nothing."""
    if not course.tells_inputs:
        return {}
    already = course.recomputed() | {call.layer for call in course.calls if call.inputs is None}
    behind = _left_behind(course)
    found: dict[int, list[Replay]] = {}
    # From the last call to the first: in this order the backward pass comes to them.
    for call in reversed(course.calls):
        wanted = call.phase == FORWARD and call.layer > 1 and call.layer not in already
        wanted = wanted and not is_norm(course.kind(call.layer))
        if wanted and not course.path(call.layer).startswith("("):
            before = found.get(call.layer)
            replay = _replay(course, behind, call, before[-1] if before else None)
            if replay is not None:
                found.setdefault(call.layer, []).append(replay)
    return found


def _left_behind(course: Course) -> dict[StorageLifetime, int]:
    """When what autograd keeps alone would be gone without it, as far as its place tells.

    What a module makes and does not return is gone as its forward ends, however deep in another it is.
    """
    found: dict[StorageLifetime, int] = {}
    for call in course.calls:  # the inner ones first
        if call.phase == FORWARD:
            left = [life for life in _made(course, call) if life.end > call.end]
            result = _result(left)
            for life in left:
                if life is not result:
                    found.setdefault(life, call.end)
    return found


def _made(course: Course, call: Call) -> list[StorageLifetime]:
    return [life for life in course.made_during(call) if life.passing]


def _replay(
    course: Course, behind: dict[StorageLifetime, int], call: Call, before: Replay | None
) -> Replay | None:
    inner = _made(course, call)
    left = [life for life in inner if life.end > call.end]
    result = _result(left)
    backward = course.backward_after(call.end)
    dropped = {life: behind[life] for life in left if life is not result and life.end > backward}
    if not dropped:
        return None
    again = _reached(course, call, min(life.end for life in dropped))
    if before is not None and before.begins < again < before.done:
        again = _reached_again(course, before)
    if result is not None and result.uses.asked in course.below(call.layer):
        # It was kept by the module itself, whose last operation needs what it has made.
        dropped[result] = _passed_on(course, call, result)
        result = None
    # What is left at the end of the call is made again, but for a result that nobody inside asks for.
    again_made = [
        Span(life.begin - call.begin, min(life.end, call.end) - call.begin, life.size)
        for life in inner
        if life is not result
    ]
    spike = highest(again_made, call.end - call.begin)
    done = max(life.end for life in dropped)
    return Replay(dropped, again, spike, done, call.inputs or (), call.begin)


def _passed_on(course: Course, call: Call, result: StorageLifetime) -> int:
    """When the modules that get a call's result have run their forward."""
    got = (
        later.end
        for later in course.calls
        if later.begin >= call.end and later.phase == FORWARD and result in (later.inputs or ())
    )
    return max(got, default=call.end)


def _result(left: Sequence[StorageLifetime]) -> StorageLifetime | None:
    largest = max((life.size for life in left), default=0)
    return next((life for life in reversed(left) if life.size * _RESULT >= largest), None)


def _reached(course: Course, call: Call, first_freed: int) -> int:
    """When the backward pass comes to the module, without leaving it until something of it is freed."""
    inside = course.below(call.layer)
    reached = first_freed
    for turn in reversed(course.turns[: course.turns_before(first_freed)]):
        if turn.phase != BACKWARD or turn.layer not in inside:
            break
        reached = turn.at
    return reached


def _reached_again(course: Course, before: Replay) -> int:
    """When the backward pass comes to a module, having gone through another call of it just before.

    It enters each call where the forward left it: in the same layer.
    """
    turns = course.turns[course.turns_before(before.again) :]
    first = next((turn for turn in turns if turn.phase == BACKWARD), None)
    if first is not None:
        for turn in turns:
            if turn.at >= before.done and turn[1:] == first[1:]:
                return turn.at
    return before.done


def _peak(course: Course, replays: dict[int, list[Replay]], group: Sequence[int]) -> int:
    calls = [replay for layer in group for replay in replays[layer]]
    kept: dict[StorageLifetime, int] = {}
    for replay in calls:
        for life in replay.inputs:
            kept[life] = max(replay.done, kept.get(life, START))
    ends = {life: end for replay in calls for life, end in replay.dropped.items()}
    module_stack = [
        Span(steady_begin(life), max(ends.get(life, life.end), kept.get(life, START)), life.size)
        for life in course.lives
    ]
    module_stack += [
        Span(replay.again, life.end, life.size) for replay in calls for life in replay.dropped
    ]
    if course.trace.result.device == "cpu":
        module_stack += [Span(replay.begins, replay.done, _RANDOM_STATE) for replay in calls]
    return highest(module_stack, course.length, [(replay.again, replay.spike) for replay in calls])

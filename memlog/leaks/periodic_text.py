"""Titles, evidence and remedies of findings about containers that grow whenever memory rises."""

from __future__ import annotations

from typing import Final

import torch

from memlog._internal.inert_access import is_kind, type_name
from memlog._internal.terminal import format_bytes
from memlog.leaks import assignment_lines
from memlog.leaks.growers import FREQUENT, Grower, is_training_state, length_of, newest_of, owner_of
from memlog.leaks.holders import (
    ALSO,
    FILLS,
    FOR_LIMIT,
    FOR_TRACEBACK,
    FOR_VIEWS,
    GRAPH_OF_STEP,
    REMEDIES,
    Confidence,
    Holder,
    HolderKind,
    addition,
    also_tensors,
    cached_at,
    function_elsewhere,
    limit_text,
    limited_at,
    remedy_for_owner,
    without_graph,
)
from memlog.leaks.live_tensors import is_scalar
from memlog.leaks.owner_text import Owner

_SURE: Final = 3
"""With fewer rises at which the container grew, the confidence is at most medium."""
_WITHIN: Final = 0.25
"""If the gained elements hold the growth up to this part of it, the confidence can be high."""
_APART: Final = 0.1
"""If a container gained more often or less often than the usual time between two rises tells, by more than
this part and by more than one time, it is not told how many steps lie between."""
_KEPT_GRAPH: Final = "Keep only numbers (`.item()`), or tensors without their graphs (`.detach()`)."
_ORDINARY: Final = (list, tuple, dict, set, torch.Tensor)
"""Types of elements that tell nothing about what is in them."""
_MORE_TRAINED: Final = ("an optimizer's state grows as the program trains more of its layers",)
_NOUNS: Final[dict[HolderKind, str]] = {
    "optimizers_pile_up": "optimizer",
    "model_copies": "module",
    "hooks_pile_up": "hook",
}


def holder_of_growth(grower: Grower) -> Holder:
    """Return the description of a container that grows whenever memory rises."""
    if not _is_period(grower):
        grower = grower._replace(each=grower.gained, every=0)
    owner = owner_of(grower)
    kind = _kind(grower)
    added = addition(owner)
    where = cached_at(owner) if added is None else assignment_lines.shown(added[0], added[1].line)
    rise = grower.growth / grower.rises
    limited, left = limited_at(owner, added), grower.bytes_left
    is_training = is_training_state(grower.chain)
    if left is None and (is_training or limited is not None) and grower.containers == 1:
        length = length_of(grower.chain.objects[-1])
        left = FILLS * length * grower.bytes_gained / grower.gained
    return Holder(
        kind,
        _title(owner, grower, where, function_elsewhere(owner, added)),
        where,
        grower.bytes_gained / grower.steps,
        (*_evidence(grower, rise), *(_MORE_TRAINED if is_training else limit_text(limited))),
        _confidence(grower, owner),
        _remedy(kind, grower, owner, added[1].value if added is not None else ""),
        left,
    )


def _is_period(grower: Grower) -> bool:
    """Return False if the usual gain, every so many steps, is not what it gained in all."""
    if not grower.every or grower.is_steady:
        return True
    times, expected = grower.gained / grower.each, grower.steps / grower.every
    return abs(times - expected) <= max(1, _APART * expected)


def _remedy(kind: HolderKind, grower: Grower, owner: Owner, value: str) -> str | None:
    newest = newest_of(grower.chain.objects[-1])
    if kind == "kept_graph":
        remedy = _KEPT_GRAPH
        if _is_tensor(grower):
            remedy = without_graph(value, is_scalar=is_scalar(newest))
        own = grower.bytes_gained - grower.graph
        if own >= ALSO * grower.bytes_gained:
            return f"{remedy} {also_tensors(own / grower.steps)}"
        return remedy
    chosen = None
    if kind in ("kept_tensors", "growing_container"):
        parts = newest if type(newest) is tuple else (newest,)
        has_error = any(is_kind(part, BaseException) for part in parts)
        special = {FOR_TRACEBACK: has_error, FOR_VIEWS: grower.are_views, FOR_LIMIT: grower.slots}
        chosen = remedy_for_owner(owner) or next(
            (text for text, is_so in special.items() if is_so), None
        )
    return chosen or REMEDIES.get(kind)


def _kind(grower: Grower) -> HolderKind:
    if grower.graph > grower.bytes_gained / 2:
        return "kept_graph"
    if grower.is_pile_of_hooks:
        return "hooks_pile_up"
    newest = newest_of(grower.chain.objects[-1])
    if is_kind(newest, torch.optim.Optimizer):
        return "optimizers_pile_up"
    if is_kind(newest, torch.nn.Module):
        return "model_copies"
    return "kept_tensors" if grower.tensors and not grower.foreign else "growing_container"


def _title(owner: Owner, grower: Grower, where: str | None, function: str) -> str:
    place = f" {owner.place}" if owner.place else ""
    at = f" ({where})" if where else ""
    name = f"`{owner.expression}`" if owner.expression else "A container"
    every = _every(grower)
    is_steady = grower.is_steady
    part = 1 / grower.steps if is_steady else grower.each / grower.gained
    size = format_bytes(grower.bytes_gained * part)
    size += " per step" if is_steady else " each time" if grower.every else ""
    if grower.is_buffer:
        return f"{name}{place}{at} is replaced by larger ones: {size}."
    here, there = (place, f" in `{function}()`{at}") if function else (f"{place}{at}", "")
    if grower.containers > 1:
        subject = f"{name} and the like, {grower.containers} containers{here}, gain"
    else:
        subject = f"{name}, {owner.kind}{here}, gains" if owner.kind else f"{name}{here} gains"
    gain = _gain(grower)
    gains = f"{subject} {gain} {every}{there}"
    is_one = gain.startswith("one ")
    if grower.foreign:
        within = f" (`{grower.foreign}`)" if grower.foreign not in gain else ""
        memory = f"{'Its' if is_one else 'Their'} memory is outside Python{within}"
        return f"{gains}. {memory}: that explains {size}."
    if grower.is_partial:
        return f"{gains}. An element has too many objects to add up: by elimination, they explain {size}."
    if grower.graph > grower.bytes_gained / 2:
        is_each = grower.is_steady and _is_tensor(grower)
        keeps = "It keeps an autograd graph" if is_one else "They keep autograd graphs"
        return f"{gains}. {GRAPH_OF_STEP if is_each else f'{keeps} alive'} ({size})."
    return f"{gains}. That keeps {size}{_limit(grower)}."


def _limit(grower: Grower) -> str:
    if not grower.slots:
        return ""
    all_bytes = grower.slots * grower.bytes_gained / grower.gained
    return f", and at most {grower.slots:,} elements ({format_bytes(all_bytes)})"


def _gain(grower: Grower) -> str:
    count = grower.gained
    if not grower.is_steady:
        count = round(grower.each)
    elif _is_frequent(grower):
        count = round(count / grower.steps)
    noun = _NOUNS.get(_kind(grower), "tensor" if _is_tensor(grower) else "element")
    newest = newest_of(grower.chain.objects[-1])
    if (
        grower.foreign
        and newest is not None
        and not any(is_kind(newest, kind) for kind in _ORDINARY)
    ):
        noun = f"`{type_name(newest)}`"
        return f"one {noun}" if count == 1 else f"{count:,} of type {noun}"
    if count == 1:
        return f"one {noun}"
    return f"{count:,} {noun}s"


def _is_tensor(grower: Grower) -> bool:
    return grower.tensors == 1 and not grower.foreign


def _is_frequent(grower: Grower) -> bool:
    return grower.gained >= FREQUENT * grower.steps


def _every(grower: Grower) -> str:
    steps = round(grower.every)
    if grower.is_steady:
        return "per step" if _is_frequent(grower) else f"in {grower.steps:,} steps"
    if not steps:  # it was not seen twice how many steps lie between
        return "when memory rises" if grower.rises == 1 else f"in {grower.steps:,} steps"
    return "at each step" if steps == 1 else f"every {steps:,} steps"


def _evidence(grower: Grower, each: float) -> tuple[str, ...]:
    times = "one rise" if grower.rises == 1 else f"each of {grower.rises} rises"
    often = f" ({_every(grower)})" if grower.every and grower.rises > 1 else ""
    evidence = [f"memory rose by {format_bytes(each)} at {times}{often}"]
    if grower.is_steady:
        evidence = [f"memory rose by {format_bytes(grower.growth)} in {grower.steps:,} steps"]
    if grower.is_buffer:
        return (*evidence, f"it is {format_bytes(grower.gained)} larger after {grower.steps} steps")
    is_one = grower.gained == 1
    more = "one more element" if is_one else f"{grower.gained:,} more elements"
    held = f"{more} after {grower.steps:,} steps"
    if grower.is_by_elimination:
        evidence.append(f"{held}; no other container that grew meanwhile explains the memory")
    else:
        holds = "holds" if is_one else "hold"
        evidence.append(f"{held}, which {holds} {format_bytes(grower.bytes_gained)}")
    if not grower.is_by_elimination and grower.tensors > 1:
        evidence.append(f"an element has {grower.tensors:,.0f} tensors")
    return tuple(evidence)


def _confidence(grower: Grower, owner: Owner) -> Confidence:
    if grower.readings < 2:  # noqa: PLR2004 - seen one time
        return "low"
    sure = grower.readings >= _SURE and abs(grower.explained - 1) <= _WITHIN
    return "high" if sure and owner.root.name and not grower.is_by_elimination else "medium"

"""Numpy arrays that share a tensor's memory."""

from __future__ import annotations

import gc
import itertools
import operator
import sys
from collections.abc import Sequence
from collections.abc import Set as AbstractSet
from typing import Any

from memlog.leaks.time_budget import TimeBudget


def views_of(
    objects: list[Any], tensors: Sequence[Any], huge: AbstractSet[int], budget: TimeBudget
) -> dict[int, list[Any]]:
    """Return the arrays that share memory with tensors, by the tensor's identity.

    The garbage collector does not track arrays, so a search for referrers does not find arrays as owners.
    ``objects`` are all objects that the collector tracks. ``huge`` has the identities of large
    containers. Arrays that only these containers refer to are not found.
    """
    array = getattr(sys.modules.get("numpy"), "ndarray", None)
    found: dict[int, list[Any]] = {id(tensor): [] for tensor in tensors}
    if array is None or not found:
        return {}
    for batch in budget.batches(objects):
        referents = gc.get_referents(*(one for one in batch if id(one) not in huge))
        arrays = map(operator.is_, map(type, referents), itertools.repeat(array))
        for one in itertools.compress(referents, arrays):
            owner = id(_memory_owner(one, array))
            if owner in found:
                found[owner].append(one)
    return {owner: arrays for owner, arrays in found.items() if arrays}


def _memory_owner(one: Any, array: Any) -> Any:
    while type(one) is array:
        one = array.base.__get__(one)
    return one

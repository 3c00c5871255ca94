"""Containers that grow, and what one element more takes.

A census is the lengths of all containers, by identity. A container grows if it is longer in each of three
censuses. CPython's collector does not track a dictionary that holds only numbers and strings, nor a
``bytearray``: a census finds them through the objects that refer to them.
"""

from __future__ import annotations

import gc
import itertools
import operator
import sys
import weakref
from collections import deque
from collections.abc import Sequence
from types import (
    BuiltinFunctionType,
    CodeType,
    FrameType,
    FunctionType,
    GetSetDescriptorType,
    MappingProxyType,
    MemberDescriptorType,
    MethodDescriptorType,
    ModuleType,
    WrapperDescriptorType,
)
from typing import Any, Final, NamedTuple

from memlog.leaks.inert_access import bases, container_base, container_kind, container_length
from memlog.leaks.kind_table import KindTable
from memlog.leaks.time_budget import TimeBudget

SHORTEST: Final = 3
"""Elements below which a container is not counted."""
_BATCH: Final = 20_000
_MAX_COUNTED: Final = 300_000
"""Maximum number of containers in a census: about 30 MB."""
_MAX_REACHED: Final = 20_000
"""Maximum number of objects that are looked at to find out what an element takes."""
_SAMPLE: Final = 4
"""Elements whose size is measured."""
_SHARED: Final = (
    type,
    ModuleType,
    FunctionType,
    BuiltinFunctionType,
    CodeType,
    FrameType,
    MappingProxyType,
)
"""Types of objects that an element refers to and does not own."""
_NO_OWNERS: Final = frozenset(
    id(kind)
    for kind in (
        FunctionType,
        type,
        tuple,
        property,
        staticmethod,
        classmethod,
        weakref.ref,
        BuiltinFunctionType,
        MethodDescriptorType,
        WrapperDescriptorType,
        GetSetDescriptorType,
        MemberDescriptorType,
        ModuleType,
    )
)
"""Types, by identity, of most objects in a program: they hold no container that only they can reach."""


class Growth(NamedTuple):
    """A container that grows.

    Attributes:
        container: The container.
        base: Its type among `memlog.leaks.inert_access.CONTAINERS`.
        gained: Elements that it gained between the first and the last census.
    """

    container: Any
    base: type
    gained: int


class Census:
    """Lengths of all containers by identity.

    Args:
        objects: All objects that the collector tracks.
        budget: Time for it.

    Attributes:
        lengths: Lengths by identity.
    """

    def __init__(self, objects: list[Any], budget: TimeBudget) -> None:
        self.lengths: dict[int, int] = {}
        kinds = KindTable(container_kind)
        for batch in budget.batches(objects, _BATCH):
            for one, base in kinds.select([*batch, *_untracked(batch)]):
                length = container_length(one, base)
                if length >= SHORTEST:
                    self.lengths[id(one)] = length
            if len(self.lengths) >= _MAX_COUNTED:
                return


def _untracked(objects: Sequence[Any]) -> list[Any]:
    """Return containers that the objects refer to and that the collector does not track."""
    # All of this runs in C: there are ten times as many referents as objects.
    kinds = map(id, map(type, objects))
    plain = itertools.compress(objects, map(operator.not_, map(_NO_OWNERS.__contains__, kinds)))
    referents = gc.get_referents(*plain)
    types = list(map(type, referents))
    dicts = itertools.compress(referents, map(operator.is_, types, itertools.repeat(dict)))
    arrays = itertools.compress(referents, map(operator.is_, types, itertools.repeat(bytearray)))
    return [*itertools.filterfalse(gc.is_tracked, dicts), *arrays]


def growing(objects: list[Any], before: Sequence[Census], budget: TimeBudget) -> list[Growth]:
    """Return the containers that are longer in each census of ``before`` than in the one before, and now.

    Args:
        objects: All objects that the collector tracks.
        before: Censuses, the oldest first.
        budget: Time for it.
    """
    first, last = before[0].lengths, before[-1].lengths
    candidates = {key for key, length in last.items() if first.get(key, length) < length}
    found: dict[int, Growth] = {}
    for batch in budget.batches(objects, _BATCH):
        every = [*batch, *_untracked(batch)]
        known = map(candidates.__contains__, map(id, every))
        for one in itertools.compress(every, known):
            base = container_base(one)
            length = 0 if base is None else container_length(one, base)
            if base is not None and length > last[id(one)]:
                found[id(one)] = Growth(one, base, length - first[id(one)])
    return list(found.values())


class ElementSizes:
    """Sizes of what containers gain.

    Args:
        counted: Identities of storages that count elsewhere.
        budget: Time for it.
    """

    def __init__(self, counted: frozenset[int], budget: TimeBudget) -> None:
        self._counted = counted
        self._budget = budget

    def bytes_per_element(self, growth: Growth) -> float:
        """Return what the newest elements of a container take and the older ones do not share.

        That is the size of all objects that the newest elements refer to, except those that older elements
        refer to as well. What an element refers to and does not own, such as a class, does not count.
        """
        slot = _SLOTS[growth.base]
        if growth.base is bytearray:
            return slot
        newest = _newest(growth.container, growth.base, 2 * _SAMPLE)
        half = len(newest) // 2
        if not half:
            return slot
        seen: set[int] = {id(growth.container)}
        self._reach(newest[half:], seen)
        added = self._reach(newest[:half], seen)
        return slot + (added / half if added is not None else 0.0)

    def _reach(self, roots: list[Any], seen: set[int]) -> float | None:
        """Return the size of all objects that can be reached; ``None`` if there are too many."""
        waiting, total = list(roots), 0.0
        kept = []  # an object that is freed meanwhile would give its identity to another one
        while waiting:
            one = waiting.pop()
            if id(one) in seen or _is_shared(type(one)):
                continue
            if len(seen) >= _MAX_REACHED or self._budget.spent:
                return None
            seen.add(id(one))
            kept.append(one)
            size, inner = self._size(one, seen)
            total += size
            waiting += inner
        return total

    def _size(self, one: Any, seen: set[int]) -> tuple[float, list[Any]]:
        """Return the size of one object without those that it refers to, and these."""
        kind = type(one)
        if any(kind is atom for atom in _ATOMS):
            return sys.getsizeof(one), []
        base = _sized_base(kind)
        if base is not None:
            return base.__sizeof__(one), gc.get_referents(one)
        array = _array_size(one)
        if array is not None:
            return array
        tensor = _tensor_storage(one)
        if tensor is None:
            return object.__sizeof__(one), gc.get_referents(one)
        key, size = tensor
        if key in seen or key in self._counted:
            return _TENSOR, []
        seen.add(key)
        return size + _TENSOR, []


_TENSOR: Final = 600
"""Bytes of a tensor besides its elements, about."""
_SLOTS: Final[dict[type, float]] = {list: 9, deque: 9, dict: 100, set: 60, bytearray: 1.06}
"""Bytes that an element takes in the container itself, with its share of the free slots, about."""
_ATOMS: Final = (int, float, complex, str, bytes, bytearray, bool, type(None))
_SIZED: Final = (str, bytes, bytearray, int, float, tuple, list, dict, set, frozenset, deque)


def _sized_base(kind: type) -> type | None:
    return next((base for base in bases(kind) if any(base is one for one in _SIZED)), None)


def _is_shared(kind: type) -> bool:
    return any(base is one for base in bases(kind) for one in _SHARED)


def _newest(container: Any, base: type, count: int) -> list[Any]:
    """Return the last elements, the newest first; of a set any; of a dictionary the keys and values."""
    try:
        if base is list:
            return list.__getitem__(container, slice(-count, None))[::-1]
        if base is dict:
            return list(itertools.islice(reversed(dict.items(container)), count))
        if base is deque:
            return list(itertools.islice(deque.__reversed__(container), count))
        return list(itertools.islice(set.__iter__(container), count))
    except RuntimeError:  # another thread changed it meanwhile
        return []


def _array_size(one: Any) -> tuple[float, list[Any]] | None:
    numpy = sys.modules.get("numpy")
    array = getattr(numpy, "ndarray", None)
    if array is None or not any(base is array for base in bases(type(one))):
        return None
    owner = array.base.__get__(one)
    if owner is not None:
        return array.__sizeof__(one), [owner]
    return array.__sizeof__(one) + array.nbytes.__get__(one), []


def _tensor_storage(one: Any) -> tuple[int, int] | None:
    torch = sys.modules.get("torch")
    tensor = getattr(torch, "Tensor", None)
    if torch is None or tensor is None or not any(base is tensor for base in bases(type(one))):
        return None
    try:
        with torch._C.DisableTorchFunctionSubclass():
            storage = torch._C.TensorBase.untyped_storage(one)
            return storage._cdata, storage.nbytes()
    except (RuntimeError, NotImplementedError):  # it has no storage
        return 0, 0

"""Containers that grow, and the sizes of the elements that they gain.

A census records the length of each container, by the container's identity. A container counts as growing if
it is longer in the last census than in the first census, and even longer now. CPython's collector tracks
neither a ``bytearray`` nor a dictionary that holds only numbers and strings, and so neither does a census:
to look for them in all objects takes longer than everything else in a search. `memlog.leaks.periodic_search`
follows those that a name of the program leads to.
"""

from __future__ import annotations

import gc
import itertools
import sys
from collections import deque
from collections.abc import Mapping, Sequence
from contextlib import suppress
from itertools import islice, repeat
from operator import is_not
from types import (
    BuiltinFunctionType,
    CodeType,
    FrameType,
    FunctionType,
    MappingProxyType,
    ModuleType,
)
from typing import Any, Final, NamedTuple

import torch

from memlog._internal.inert_access import (
    bases,
    container_base,
    container_kind,
    container_length,
    is_kind,
    own_method,
)
from memlog.leaks.kind_table import KindTable
from memlog.leaks.live_tensors import parts_of, tensor_storage
from memlog.leaks.time_budget import TimeBudget

_MAX_COUNTED: Final = 300_000
"""Maximum number of containers in a census. A census of this length takes about 30 MB."""
_MAX_REACHED: Final = 20_000
"""Maximum number of objects that are visited to measure the elements of one container."""
_HUGE: Final = 200_000
"""If a container has more elements than this, it is not searched for other containers. Searching this number
of elements takes 10 ms."""
_MAX_SLOTS: Final = 1_000_000
"""If a list or dictionary has more elements than this, all of them count. If it has slots, to count those
that are not empty takes 25 ms for this number."""
_LOOKED: Final = 64
"""Number of elements of a list, or at each end of a dictionary, among which a slot is looked for first."""
_FEW: Final = 16
"""A shorter list or dictionary is not looked at for slots."""
_SAMPLE: Final = 4
"""Number of a container's newest elements whose size is measured."""
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


class ContainerGrowth(NamedTuple):
    """A container that grows.

    ``base`` is the member of `memlog._internal.inert_access.CONTAINERS` that is the container's type or a
    base class of this type. ``gained`` is the number of elements gained since the first census.
    """

    container: Any
    base: type
    gained: int


def filled(container: Any, base: type) -> int:
    """Return the number of a container's elements. A None in a list or dictionary is an empty slot."""
    length = container_length(container, base)
    if not (base is list or base is dict) or not _FEW < length <= _MAX_SLOTS:
        return length
    with suppress(RuntimeError):  # another thread has changed the container meanwhile
        if base is dict:
            values: Any = dict.values(container)
            some = [*islice(values, _LOOKED), *islice(reversed(values), _LOOKED)]
        else:
            values = list.__iter__(container)
            stride = max(1, length // _LOOKED)
            some = list.__getitem__(container, slice(None, None, stride))
            some += list.__getitem__(container, slice(-1, None))
        if not all(map(is_not, some, repeat(None))):
            return sum(map(is_not, values, repeat(None)))
    return length


class Census:
    """Lengths of all containers, by the container's identity.

    ``objects`` are all objects that the collector tracks. ``huge`` has the identities of the containers with
    more than `_HUGE` elements. They are not searched for other objects.
    """

    def __init__(self, objects: list[Any], budget: TimeBudget) -> None:
        self.lengths: dict[int, int] = {}
        self.huge: set[int] = set()
        kinds = KindTable(container_kind)
        for batch in budget.batches(objects):
            for one, base in kinds.select(batch):
                length = container_length(one, base)
                if length:
                    self.lengths[id(one)] = length
                    if length > _HUGE:
                        self.huge.add(id(one))
            if len(self.lengths) >= _MAX_COUNTED:
                return


def growing(
    objects: list[Any], before: Sequence[Census], budget: TimeBudget
) -> list[ContainerGrowth]:
    """Return the containers that are longer in the last census than in the first, and even longer now.

    ``objects`` are all objects that the collector tracks. ``before`` has the censuses, the oldest first.
    """
    first, last = before[0].lengths, before[-1].lengths
    candidates = {key for key, length in last.items() if first.get(key, length) < length}
    found: dict[int, ContainerGrowth] = {}
    for batch in budget.batches(objects):
        known = map(candidates.__contains__, map(id, batch))
        for one in itertools.compress(batch, known):
            base = container_base(one)
            length = 0 if base is None else container_length(one, base)
            if base is not None and length > last[id(one)]:
                found[id(one)] = ContainerGrowth(one, base, length - first[id(one)])
    return list(found.values())


class ElementSize(NamedTuple):
    """Mean size, in bytes, of an element that a container gains.

    ``objects`` is the part in Python objects and arrays, ``storages`` the part in storages of tensors.
    """

    objects: float
    storages: float


def element_size(growth: ContainerGrowth, budget: TimeBudget) -> ElementSize:
    """Return the mean size of a container's newest elements, including their share of the container's memory.

    The size includes all objects to which the newest elements refer. It excludes objects to which older
    elements also refer. It excludes objects that an element does not own, such as its class.
    """
    slot = _SLOTS[growth.base]
    if growth.base is bytearray:
        return ElementSize(slot, 0.0)
    newest = newest_elements(growth.container, growth.base, 2 * _SAMPLE)
    half = len(newest) // 2
    reach = _Reach(growth.container, budget)
    if not half or not reach.add(newest[half:]):
        return ElementSize(slot, 0.0)
    older = reach.objects, reach.storages
    if not reach.add(newest[:half]):
        return ElementSize(slot, 0.0)
    return ElementSize(slot + (reach.objects - older[0]) / half, (reach.storages - older[1]) / half)


class _Reach:
    """Size of all objects that can be reached from given objects, in bytes. Each object counts once.

    ``objects`` and ``storages`` have the same meanings as in `ElementSize`.
    """

    def __init__(self, container: Any, budget: TimeBudget) -> None:
        self.objects = self.storages = 0.0
        self._budget = budget
        self._seen: set[int] = {id(container)}
        # Keeps the counted objects alive: a new object could get the identity of an object that was freed.
        self._kept: list[Any] = []

    def add(self, roots: list[Any]) -> bool:
        """Add all objects that can be reached from ``roots``. Return False if this takes too long."""
        waiting = list(roots)
        while waiting:
            one = waiting.pop()
            if id(one) in self._seen or is_shared(type(one)):
                continue
            if len(self._seen) >= _MAX_REACHED or self._budget.spent:
                return False
            self._seen.add(id(one))
            self._kept.append(one)
            if is_kind(one, torch.Tensor):
                self.objects += _TENSOR
                self._add_storage(one)
            else:
                size, inner = size_and_referents(one)
                self.objects += size
                waiting += inner
        return True

    def _add_storage(self, tensor: Any) -> None:
        with torch._C.DisableTorchFunction(), suppress(RuntimeError):  # the size can be symbolic
            for storage in map(tensor_storage, parts_of(tensor)):
                if storage is not None and storage._cdata not in self._seen:
                    self._seen.add(storage._cdata)
                    self.storages += storage.nbytes()


def size_and_referents(one: Any) -> tuple[float, list[Any]]:
    """Return an object's own size, and the objects that it refers to."""
    kind = type(one)
    if kind is dict:  # `gc.get_referents` leaves out string keys
        return sys.getsizeof(one), [*one.keys(), *one.values()]
    if is_atom(kind):
        return sys.getsizeof(one), []
    size = own_method(one, "__sizeof__")()
    if is_kind(one, dict):
        return size, [*dict.keys(one), *dict.values(one)]
    array = getattr(sys.modules.get("numpy"), "ndarray", None)
    if array is not None and is_kind(one, array):
        owner = array.base.__get__(one)
        return size, [] if owner is None else [owner]
    return size, gc.get_referents(one)


_TENSOR: Final = 600
"""Approximate bytes of a tensor object without its elements."""
_SLOTS: Final[dict[type, float]] = {list: 9, deque: 9, dict: 100, set: 60, bytearray: 1.06}
"""Approximate bytes per element in a container's own memory, including unused slots."""
_ATOMS: Final = (int, float, complex, str, bytes, bytearray, bool, type(None))


def is_atom(kind: type) -> bool:
    """Return True for types whose objects refer to no others."""
    return any(kind is atom for atom in _ATOMS)


def is_shared(kind: type) -> bool:
    return any(base is one for base in bases(kind) for one in _SHARED)


def standing_still(lengths: Mapping[int, float]) -> set[int]:
    """Return the identities of containers that are not as long as expected.

    ``lengths`` has the expected lengths by the containers' identities. A container that Python's collector
    does not track is left out. This looks at all objects: 10 to 50 ms.
    """
    found = set()
    for one in gc.get_objects():
        if id(one) in lengths:
            base = container_base(one)
            if base is not None and filled(one, base) < lengths[id(one)]:
                found.add(id(one))
    return found


def newest_elements(container: Any, base: type, count: int) -> list[Any]:
    """Return the newest elements of a container, the newest first. Empty slots (`filled`) are left out.

    Elements of a dictionary are pairs of a key and a value. A set has no order: any elements are returned.
    """
    try:
        if base is list:
            backward = list.__reversed__(container)
            used = map(is_not, list.__reversed__(container), repeat(None))
            return list(islice(itertools.compress(backward, used), count))
        if base is dict:
            pairs = reversed(dict.items(container))
            used = map(is_not, reversed(dict.values(container)), repeat(None))
            return list(islice(itertools.compress(pairs, used), count))
        if base is deque:
            return list(islice(deque.__reversed__(container), count))
        return list(islice(set.__iter__(container), count))
    except RuntimeError:  # another thread has changed the container meanwhile
        return []


def oldest_element(container: Any, base: type) -> list[Any]:
    """Return a list of the first element of a container, like `newest_elements`."""
    try:
        values = dict.items(container) if base is dict else container
        forward = iter(values) if base is dict else base.__iter__(container)  # type: ignore[attr-defined]
        return list(islice(forward, 1))
    except RuntimeError:  # see above
        return []

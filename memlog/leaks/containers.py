"""Containers that grow, and the bytes of the elements that they gain.

A census records the length of each container, by the container's identity. A container counts as growing if
it is longer in the last census than in the first census, and even longer now. CPython's collector tracks
neither a ``bytearray`` nor a dictionary that holds only numbers and strings, and so neither does a census:
to look for them in all objects takes longer than everything else in a search. `memlog.leaks.periodic_search`
follows those that a name of the program leads to.
"""

from __future__ import annotations

import builtins
import ctypes
import gc
import itertools
import sys
import types
from collections import Counter, deque
from collections.abc import Mapping, Sequence
from contextlib import suppress
from itertools import compress, islice, repeat
from operator import is_not, not_
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
    TracebackType,
    WrapperDescriptorType,
)
from typing import Any, Final, NamedTuple

import torch

from memlog._internal.inert_access import (
    CONTAINERS,
    bases,
    class_namespace,
    container_base,
    container_kind,
    container_length,
    is_kind,
    own_method,
    type_name,
)
from memlog.leaks.autograd_graphs import saved_names, saved_value
from memlog.leaks.live_tensors import parts_of, shown_bytes, tensor_storage
from memlog.leaks.owner_chain import running_frames
from memlog.leaks.process_objects import KindTable, TimeBudget
from memlog.torchside.tensors import DisableTorchFunction, DisableTorchFunctionSubclass, TensorBase

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
_PLAIN: Final = frozenset(map(id, CONTAINERS))
"""Identities of the containers' own types, without subclasses."""
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
        # If a sample has no None, the elements are not counted one by one, which can take 25 ms.
        if base is dict:
            values: Any = dict.values(container)
            some = [*islice(values, _LOOKED), *islice(reversed(values), _LOOKED)]
        else:
            values = list.__iter__(container)
            stride = max(1, length // _LOOKED)
            some = list.__getitem__(container, slice(None, None, stride))
            # A list of slots that is filled from the front has its last slot empty until it is full.
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
            is_plain = list(map(_PLAIN.__contains__, map(id, map(type, batch))))
            # Nearly all containers are plain, and `len` runs no code of the program for them.
            plain = list(compress(batch, is_plain))
            self._add(list(map(id, plain)), list(map(len, plain)))
            others = list(kinds.select(list(compress(batch, map(not_, is_plain)))))
            self._add(
                [id(container) for container, _ in others],
                [container_length(container, base) for container, base in others],
            )
            if len(self.lengths) >= _MAX_COUNTED:
                return

    def _add(self, numbers: list[int], lengths: list[int]) -> None:
        self.lengths.update(compress(zip(numbers, lengths, strict=True), lengths))  # not empty ones
        if max(lengths, default=0) > _HUGE:
            pairs = zip(numbers, lengths, strict=True)
            self.huge.update(number for number, length in pairs if length > _HUGE)


def growing(
    objects: list[Any], before: Sequence[Census], budget: TimeBudget
) -> list[ContainerGrowth]:
    """Return the containers that are longer in the last census than in the first, and even longer now.

    ``objects`` are all objects that the collector tracks. ``before`` has the censuses, the oldest first.
    """
    first, last = before[0].lengths, before[-1].lengths
    # A container that is missing in the first census was made later. It is no candidate.
    candidates = {key for key, length in last.items() if first.get(key, length) < length}
    growths: dict[int, ContainerGrowth] = {}
    for batch in budget.batches(objects):
        known = map(candidates.__contains__, map(id, batch))
        for container in itertools.compress(batch, known):
            base = container_base(container)
            length = 0 if base is None else container_length(container, base)
            if base is not None and length > last[id(container)]:
                growths[id(container)] = ContainerGrowth(
                    container, base, length - first[id(container)]
                )
    return list(growths.values())


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
    # The older half comes first, so that what both halves refer to counts for it.
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
            value = waiting.pop()
            if id(value) in self._seen or is_shared(type(value)):
                continue
            if len(self._seen) >= _MAX_REACHED or self._budget.spent:
                return False
            self._seen.add(id(value))
            self._kept.append(value)
            if is_kind(value, torch.Tensor):
                self.objects += _TENSOR
                self._add_storage(value)
            else:
                size, inner = size_and_referents(value)
                self.objects += size
                waiting += inner
        return True

    def _add_storage(self, tensor: Any) -> None:
        with DisableTorchFunction(), suppress(RuntimeError):  # the size can be symbolic
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
    # `sys.getsizeof` would call a `__sizeof__` of the program.
    size = own_method(one, "__sizeof__")()
    if is_kind(one, dict):
        return size, [*dict.keys(one), *dict.values(one)]
    array = getattr(sys.modules.get("numpy"), "ndarray", None)
    # NumPy's arrays show the collector no referents, and the size of a view lacks the data of its owner.
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
    # Compared by identity: `in` would call the `__eq__` of a metaclass.
    return any(kind is atom for atom in _ATOMS)


def is_shared(kind: type) -> bool:
    return any(base is shared for base in bases(kind) for shared in _SHARED)


def standing_still(lengths: Mapping[int, float]) -> set[int]:
    """Return the identities of containers that are not as long as expected.

    ``lengths`` has the expected lengths by the containers' identities. A container that Python's collector
    does not track is left out. This looks at all objects: 10 to 50 ms.
    """
    shorter = set()
    for container in gc.get_objects():
        if id(container) in lengths:
            base = container_base(container)
            if base is not None and filled(container, base) < lengths[id(container)]:
                shorter.add(id(container))
    return shorter


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


_MAX_VISITED: Final = 20_000
"""Maximum number of objects and graph nodes that one `ElementWeight` visits, and as many again for what it
only compares with. It takes about 30 ms."""
_SLOT_TYPES: Final = (
    GetSetDescriptorType,
    MemberDescriptorType,
    MethodDescriptorType,
    WrapperDescriptorType,
)
_CData: Final = ctypes.Array.__mro__[1]
"""Base class of arrays, structures and simple values of ``ctypes``."""
_PYTHONS: Final = frozenset(
    id(kind) for space in (builtins, types) for kind in vars(space).values() if type(kind) is type
)
"""Identities of Python's own types."""
_SEEN_BY_PYTHON: Final = frozenset(("torch", "numpy"))
"""Packages whose objects tell their bytes."""
_FOREIGN: Final = frozenset(
    ("mmap", "sqlite3", "_sqlite3", "xml", "_elementtree", "ctypes", "_ctypes")
)
"""Modules of the standard library whose objects have memory that Python does not count."""


class _Kind(NamedTuple):
    """What is known of a type. The type itself is kept, so that no other one can get its identity."""

    type: type
    is_shared: bool
    is_tensor: bool
    is_atom: bool
    is_foreign: bool


class ElementWeight:
    """Sum over elements. What one element shares with those before it counts one time.

    ``apart`` has objects that do not count, nor what only they hold: the container and its owners. An element
    can refer to them, such as an exception whose traceback keeps the variables of a function.

    Attributes:
        own: Bytes of tensors, arrays and other objects.
        graph: Bytes that only autograd graphs keep.
        tensors: Number of tensors.
        storages: Part of ``own`` in storages of tensors.
        shown: Bytes of the tensors' elements: fewer than ``storages`` for views of larger tensors.
        foreign: Number of objects of each class whose memory Python does not see, by the class's name.
        elements: Number of elements that were weighed.
        is_partial: True if this is one element, with more objects than are visited. The sums are too small.
    """

    def __init__(self, apart: Sequence[Any] = ()) -> None:
        # With the objects: a new object could get the identity of one that was freed.
        self._seen: dict[Any, Any] = {id(one): one for one in apart}
        self._kinds: dict[int, _Kind] = {}
        self._most = 0
        self.forget_counts()

    def forget_counts(self) -> None:
        """Begin the sums again. What was counted before still counts as shared."""
        self._most = len(self._seen) + _MAX_VISITED
        self.own = self.graph = self.tensors = self.elements = self.storages = self.shown = 0
        self.foreign: Counter[str] = Counter()
        self.is_partial = False

    def add_older(self, older: Sequence[Any], newer: Sequence[Any]) -> None:
        """Let what ``older`` hold count as shared.

        What they reach through ``newer`` does not: an older element can refer to newer ones.
        """
        between = {id(one): one for one in newer if not is_atom(type(one))}
        for key in (*self._seen, *map(id, older)):
            between.pop(key, None)
        self._seen |= between
        self.add(older)
        for key in between:
            del self._seen[key]
        self.forget_counts()

    def add(self, elements: Sequence[Any], enough: int = _MAX_VISITED) -> None:
        """Weigh elements until ``enough`` objects and graph nodes were visited."""
        begun = len(self._seen)
        for element in elements:
            if len(self._seen) - begun >= enough:
                return
            nodes: list[Any] = []
            before = (self.own, self.graph, self.tensors, self.foreign.copy())
            self._add_objects([element], nodes)
            self._add_nodes(nodes)
            if self._is_full and self.elements:  # the last element is incomplete
                self.own, self.graph, self.tensors, self.foreign = before
                return
            self.elements += 1
            self.is_partial = self._is_full

    @property
    def shares(self) -> bool:
        """True if the tensors do not have their storages alone."""
        return bool(self.shown) and self.shown != self.storages

    @property
    def _is_full(self) -> bool:
        return len(self._seen) >= self._most

    def _is_new(self, key: Any, one: Any) -> bool:
        if key in self._seen:
            return False
        self._seen[key] = one
        return True

    def _add_objects(self, waiting: list[Any], nodes: list[Any]) -> None:
        seen, kinds = self._seen, self._kinds
        while waiting and len(seen) < self._most:
            value = waiting.pop()
            number = id(value)
            kind = kinds.get(id(type(value))) or self._kind_of(type(value))
            if kind.is_shared or number in seen:
                continue
            seen[number] = value
            if kind.is_atom:
                self.own += sys.getsizeof(value)
            elif kind.is_tensor:
                self._add_tensor(value, nodes)
            else:
                size, inner = size_and_referents(value)
                if kind.is_foreign:
                    size = max(size, told_bytes(value))
                    self.foreign[type_name(value)] += 1
                self.own += int(size)
                waiting += inner
                if type(value) is TracebackType:
                    waiting += _left_by(value)

    def _kind_of(self, kind: type) -> _Kind:
        known = self._kinds[id(kind)] = _Kind(
            kind,
            is_shared(kind),
            any(base is torch.Tensor for base in bases(kind)),
            is_atom(kind),
            is_foreign(kind),
        )
        return known

    def _add_tensor(self, tensor: Any, nodes: list[Any]) -> None:
        with DisableTorchFunctionSubclass():
            self.tensors += 1
            size = self._storage_bytes(tensor)
            self.own += size
            self.storages += size
            self.shown += shown_bytes(tensor)
            node = TensorBase.grad_fn.__get__(tensor)
            # torch warns if the gradient of any other tensor is read.
            gradient = (
                TensorBase.grad.__get__(tensor) if TensorBase.is_leaf.__get__(tensor) else None
            )
            if gradient is not None:
                self.own += self._storage_bytes(gradient)
        if node is not None:
            nodes.append(node)

    def _add_nodes(self, waiting: list[Any]) -> None:
        with DisableTorchFunctionSubclass():
            while waiting and not self._is_full:
                node = waiting.pop()
                if not self._is_new(("node", id(node)), node):
                    continue
                for name in saved_names(type(node)):
                    saved = saved_value(node, name)
                    # A `torch.autograd.Function` has a tuple of all its saved tensors under one name.
                    for variable in saved if type(saved) in (tuple, list) else (saved,):
                        data = saved_value(variable, "data")  # no unpack hook is called
                        if data is not None and is_kind(data, torch.Tensor):
                            self.graph += self._storage_bytes(data)
                waiting += [inner for inner, _ in node.next_functions if inner is not None]

    def _storage_bytes(self, tensor: Any) -> int:
        size = 0
        try:
            for storage in map(tensor_storage, parts_of(tensor)):
                if storage is not None and self._is_new(("storage", int(storage._cdata)), storage):
                    size += int(storage.nbytes())
        except RuntimeError:  # the size can be symbolic
            pass
        return size


def _left_by(traceback: TracebackType) -> list[Any]:
    """Return the objects in the variables of a function that a traceback keeps, unless it still runs."""
    frame = traceback.tb_frame
    # While a function runs, its variables live without the traceback.
    is_running = any(frame is running for running in running_frames())
    return [] if is_running else gc.get_referents(frame)


def told_bytes(one: Any) -> int:
    """Return the bytes that an object of foreign code tells, as ``nbytes`` (Arrow) or to ``ctypes``.

    Return 0 for other objects.
    """
    kinds = bases(type(one))
    if any(base is _CData for base in kinds):
        return ctypes.sizeof(one)
    for base in kinds:
        descriptor = class_namespace(base).get("nbytes")
        # A property would be the code of the program. Only attributes written in C are read.
        if type(descriptor) in _SLOT_TYPES:
            told = descriptor.__get__(one)
            return told if type(told) is int else 0
    return 0


def is_foreign(kind: type) -> bool:
    """Return True for a class written in C, C++ or Rust by a library, whose bytes Python can't see."""
    top = _package(kind)
    if id(kind) in _PYTHONS or top in _SEEN_BY_PYTHON:
        return False
    if top in sys.stdlib_module_names and top != "builtins" and top not in _FOREIGN:
        return False
    # A class such as Arrow's `DoubleArray` inherits all of its members from another one of its package.
    return any(_has_members(base) for base in bases(kind) if _package(base) == top)


def _package(kind: type) -> str:
    module = type.__dict__["__module__"].__get__(kind)
    return module.partition(".")[0] if type(module) is str else ""


def _has_members(kind: type) -> bool:
    """Return True if a class has members of its own that are written in C."""
    own = class_namespace(kind)
    return "__slots__" not in own and any(
        type(member) in _SLOT_TYPES and not key.startswith(("__dict", "__weak"))
        for key, member in own.items()
    )

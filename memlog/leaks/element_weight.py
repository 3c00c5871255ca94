"""Bytes that elements of a container hold: their own, those of graphs, and objects of foreign code."""

from __future__ import annotations

import builtins
import ctypes
import gc
import sys
import types
from collections import Counter
from collections.abc import Sequence
from types import (
    GetSetDescriptorType,
    MemberDescriptorType,
    MethodDescriptorType,
    TracebackType,
    WrapperDescriptorType,
)
from typing import Any, Final, NamedTuple

import torch

from memlog._internal.inert_access import bases, class_namespace, is_kind, type_name
from memlog.leaks.autograd_graphs import saved_names, saved_value
from memlog.leaks.containers import is_atom, is_shared, size_and_referents
from memlog.leaks.live_tensors import parts_of, shown_bytes, tensor_storage
from memlog.leaks.variable_paths import running_frames

_MAX_VISITED: Final = 20_000
"""Maximum number of objects and graph nodes that one `ElementWeight` visits, and as many again for what it
only compares with. It takes about 30 ms."""
_SLOTS: Final = (
    GetSetDescriptorType,
    MemberDescriptorType,
    MethodDescriptorType,
    WrapperDescriptorType,
)
_base: Any = torch._C.TensorBase
_CData: Final = ctypes.Array.__mro__[1]
"""Base class of arrays, structures and simple values of ``ctypes``."""
_PYTHONS: Final = frozenset(
    id(one) for space in (builtins, types) for one in vars(space).values() if type(one) is type
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

    ``container`` has the elements. An element can refer to it, such as an exception whose traceback keeps the
    variables of a function; ``None``: unknown.

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

    def __init__(self, container: Any = None) -> None:
        # With the objects: a new object could get the identity of one that was freed.
        self._seen: dict[Any, Any] = {id(container): container}
        self._kinds: dict[int, _Kind] = {}
        self._most = 0
        self.forget_counts()

    def forget_counts(self) -> None:
        """Begin the sums again. What was counted before still counts as shared."""
        self._most = len(self._seen) + _MAX_VISITED
        self.own = self.graph = self.tensors = self.elements = self.storages = self.shown = 0
        self.foreign: Counter[str] = Counter()
        self.is_partial = False

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
            one = waiting.pop()
            number = id(one)
            kind = kinds.get(id(type(one))) or self._kind_of(type(one))
            if kind.is_shared or number in seen:
                continue
            seen[number] = one
            if kind.is_atom:
                self.own += sys.getsizeof(one)
            elif kind.is_tensor:
                self._add_tensor(one, nodes)
            else:
                size, inner = size_and_referents(one)
                if kind.is_foreign:
                    size = max(size, told_bytes(one))
                    self.foreign[type_name(one)] += 1
                self.own += int(size)
                waiting += inner
                if type(one) is TracebackType:
                    waiting += _left_by(one)

    def _kind_of(self, kind: type) -> _Kind:
        found = self._kinds[id(kind)] = _Kind(
            kind,
            is_shared(kind),
            any(base is torch.Tensor for base in bases(kind)),
            is_atom(kind),
            is_foreign(kind),
        )
        return found

    def _add_tensor(self, tensor: Any, nodes: list[Any]) -> None:
        with torch._C.DisableTorchFunctionSubclass():
            self.tensors += 1
            size = self._storage_bytes(tensor)
            self.own += size
            self.storages += size
            self.shown += shown_bytes(tensor)
            node = _base.grad_fn.__get__(tensor)
            # torch warns if the gradient of any other tensor is read.
            gradient = _base.grad.__get__(tensor) if _base.is_leaf.__get__(tensor) else None
            if gradient is not None:
                self.own += self._storage_bytes(gradient)
        if node is not None:
            nodes.append(node)

    def _add_nodes(self, waiting: list[Any]) -> None:
        with torch._C.DisableTorchFunctionSubclass():
            while waiting and not self._is_full:
                node = waiting.pop()
                if not self._is_new(("node", id(node)), node):
                    continue
                for name in saved_names(type(node)):
                    saved = saved_value(node, name)
                    for one in saved if type(saved) in (tuple, list) else (saved,):
                        data = saved_value(one, "data")  # no unpack hook is called
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
    is_running = any(frame is one for one in running_frames())
    return [] if is_running else gc.get_referents(frame)


def told_bytes(one: Any) -> int:
    """Return the bytes that an object of foreign code tells, as ``nbytes`` (Arrow) or to ``ctypes``.

    Return 0 for other objects.
    """
    kinds = bases(type(one))
    if any(base is _CData for base in kinds):
        return ctypes.sizeof(one)
    for base in kinds:
        found = class_namespace(base).get("nbytes")
        if type(found) in _SLOTS:
            told = found.__get__(one)
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
        type(one) in _SLOTS and not key.startswith(("__dict", "__weak")) for key, one in own.items()
    )

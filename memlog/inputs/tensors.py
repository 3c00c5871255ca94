"""Tensors among a program's variables, by name and shape.

The search runs no code of the program. It calls only C-level functions of Python's own types. It switches off
overrides of ``__torch_function__``, and reads only plain tensors.
"""

from __future__ import annotations

import sys
from collections import UserDict
from collections.abc import Iterable, Iterator
from itertools import islice
from types import BuiltinFunctionType, FunctionType, MethodType, ModuleType
from typing import Any, cast

from memlog._internal.inert_access import bases, class_namespace, instance_dict, is_kind
from memlog.events import TensorInput

_DEPTH = 3
"""Maximum depth of containers in containers. Deeper values are not looked at."""
_ITEMS = 16
"""Containers with more items than this are not searched: they are data sets or histories, not batches."""
_VALUES = 2_000
"""Maximum number of values to look at in one search."""
_FOUND = 32
"""Maximum number of tensors to find in one search."""
_NAME = 60
"""Maximum number of characters in a tensor's name. Tensors with longer names are left out."""
_WITHOUT_TENSORS = frozenset(
    id(kind)
    for kind in (
        *(int, float, bool, str, bytes, complex, range, type(None), type, set, frozenset),
        *(FunctionType, BuiltinFunctionType, MethodType, ModuleType),
    )
)
"""Identities of types whose instances contain no tensors. The types themselves are not compared, because a
metaclass can define ``__eq__`` and ``__hash__``."""


class TensorFinder:
    """Finder of the plain tensors among some variables.

    Make a new finder for each search. A finder recognises objects by their ids, so the caller must keep the
    objects alive until the search has ended.
    """

    def __init__(self) -> None:
        self._torch: Any = sys.modules.get("torch")
        self._seen: set[int] = set()
        self._looked_at = 0
        self.found: list[TensorInput] = []
        self.tensors: list[Any] = []
        """The tensors of `found`."""

    def add(self, variables: Iterable[tuple[str, object]]) -> None:
        """Add the tensors of some variables. A tensor with several names is added under the first name."""
        if self._torch is None:
            return
        with self._torch._C.DisableTorchFunction():  # noqa: SLF001 - no public name
            for name, value in variables:
                self._add(name, value, _DEPTH)

    def _add(self, name: str, value: object, depth: int) -> None:
        kind = type(value)
        if id(kind) in _WITHOUT_TENSORS or self._is_full():
            return
        if kind is self._torch.Tensor:
            if id(value) not in self._seen:
                self._seen.add(id(value))
                self._add_tensor(name, value)
        elif depth:
            for item, inner in _items(name, value):
                self._add(item, inner, depth - 1)

    def _is_full(self) -> bool:
        self._looked_at += 1
        return self._looked_at > _VALUES or len(self.found) >= _FOUND

    def _add_tensor(self, name: str, tensor: Any) -> None:
        if tensor.requires_grad or tensor.is_nested or not tensor.dim() or len(name) > _NAME:
            return
        shape = tuple(int(size) for size in tensor.shape)
        self.found.append(TensorInput(name, shape, str(tensor.dtype).removeprefix("torch.")))
        self.tensors.append(tensor)


def _items(name: str, value: object) -> Iterator[tuple[str, object]]:
    """Yield the items of a container with their names; nothing if ``value`` is no container, or too large."""
    if is_kind(value, dict):
        yield from _dict_items(name, cast("dict[object, object]", value))
    elif is_kind(value, list):
        yield from _sequence_items(name, list.__iter__(cast("list[object]", value)))
    elif is_kind(value, tuple):
        yield from _sequence_items(name, tuple.__iter__(cast("tuple[object, ...]", value)))
    elif is_kind(value, UserDict):  # such as ``BatchEncoding`` of Hugging Face
        inner = dict(_attributes(value)).get("data")
        if type(inner) is dict:
            yield from _dict_items(name, inner)
    elif any("__dataclass_fields__" in class_namespace(one) for one in bases(type(value))):
        yield from ((f"{name}.{field}", each) for field, each in _attributes(value))


def _dict_items(name: str, values: dict[object, object]) -> Iterator[tuple[str, object]]:
    if dict.__len__(values) > _ITEMS:
        return
    for key, value in list(dict.items(values)):
        if type(key) is str and key.isprintable():
            yield f'{name}["{key}"]', value
        elif type(key) is int:
            yield f"{name}[{key}]", value


def _sequence_items(name: str, values: Iterator[object]) -> Iterator[tuple[str, object]]:
    items = list(islice(values, _ITEMS + 1))
    if len(items) <= _ITEMS:
        yield from ((f"{name}[{at}]", item) for at, item in enumerate(items))


def _attributes(value: object) -> list[tuple[str, object]]:
    """Return an instance's own attributes without calling properties or ``__getattribute__``."""
    own = instance_dict(value)
    if own is None or len(own) > _ITEMS:
        return []
    return [(name, each) for name, each in list(own.items()) if type(name) is str]

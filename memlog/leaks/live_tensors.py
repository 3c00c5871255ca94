"""Tensors and autograd nodes that live in the process, and which of them every training keeps."""

from __future__ import annotations

import gc
import itertools
import operator
import sys
import weakref
from collections.abc import Iterator, Sequence
from collections.abc import Set as AbstractSet
from contextlib import suppress
from types import MethodDescriptorType
from typing import Any, Final

import torch

from memlog._internal.inert_access import (
    bases,
    class_namespace,
    instance_dict,
    is_kind,
    own_method,
    values_in,
)
from memlog.leaks.process_objects import KindTable, TimeBudget
from memlog.torchside.tensors import DisableTorchFunction, TensorBase

VIEWS: Final = 0.5
"""If tensors show less than this part of their storages, they are views that keep larger tensors."""
_BY_ROWS: Final = (torch.sparse_csr, torch.sparse_bsr)


class LiveTensors:
    """The program's tensors. This object keeps them alive.

    ``objects`` are all objects that the collector tracks. ``first_node`` is the sequence number of the first
    graph node that the watched iterations made. If it is ``None`` (unknown), `roots` stays empty.

    Attributes:
        by_storage: Tensors of the storages that the caller asks for (``wanted``), by the storage's identity.
        roots: Tensors with a graph, and autograd nodes with a Python object. The newest root comes first.
            Each root is a tuple: sequence number of the graph's last node; the tensor or node; the graph's
            last node. A root is left out if its last node is older than ``first_node``.
    """

    def __init__(
        self,
        objects: list[Any],
        wanted: frozenset[int],
        first_node: int | None,
        budget: TimeBudget,
    ) -> None:
        self.by_storage: dict[int, list[Any]] = {}
        self.roots: list[tuple[int, Any, Any]] = []
        with DisableTorchFunction():
            for value, kind in KindTable(_kind).select_until_spent(objects, budget):
                if kind == "tensor":
                    self._add_tensor(value, wanted, first_node)
                elif first_node is not None:
                    self._add_root(value, value, first_node)
        # By the number alone: if two were equal, tuples would compare the tensors.
        self.roots.sort(key=lambda root: -root[0])

    @property
    def own(self) -> list[Any]:
        """Containers of this object that hold tensors. A search for the tensors' owners must ignore them."""
        return [self.by_storage, *self.by_storage.values(), self.roots, *self.roots]

    def add_roots(self, holders: list[tuple[Any, Any]], first_node: int) -> None:
        """Insert tensors at the front of `roots`.

        ``holders`` has tuples of a tensor and the last node of the tensor's graph. Leave out tensors whose
        last node is older than ``first_node``.
        """
        added = [(_NO_SEQUENCE, holder, node) for holder, node in holders]
        self.roots[:0] = [root for root in added if _number(root[2]) >= first_node]

    def _add_tensor(self, tensor: Any, wanted: frozenset[int], first_node: int | None) -> None:
        try:
            for storage in map(storage_of, parts_of(tensor)):
                if storage in wanted:
                    self.by_storage.setdefault(storage, []).append(tensor)
            if first_node is not None and TensorBase.requires_grad.__get__(tensor):
                node = TensorBase.grad_fn.__get__(tensor)
                if node is not None:
                    self._add_root(tensor, node, first_node)
        except (RuntimeError, AttributeError):
            return  # a tensor without storage, or one that is being freed

    def _add_root(self, holder: Any, node: Any, first_node: int) -> None:
        number = _number(node)
        if first_node <= number < _NO_SEQUENCE:
            self.roots.append((number, holder, node))


MODEL_PARTS: Final = (torch.Tensor, torch.optim.Optimizer)
"""Classes of the objects that `KnownModels` looks at."""


def parts_of_training(objects: list[Any], budget: TimeBudget) -> list[Any]:
    """Return the tensors, autograd nodes and optimizers among objects, in their order."""
    table = KindTable(lambda kind: _kind(kind) or _model_part(kind))
    return [value for value, _ in table.select_until_spent(objects, budget)]


_NO_SEQUENCE: Final = 2**62
"""Minimum sequence number of nodes that no forward operation made. These nodes accumulate gradients."""


def tensor_bytes(objects: list[Any], budget: TimeBudget) -> int | None:
    """Return the bytes of the storages of all tensors that have a Python object.

    The result is ``None`` if the time of ``budget`` runs out.

    ``objects`` are all objects that the collector tracks.
    """
    sizes: dict[int, int] = {}
    with DisableTorchFunction():
        for value, kind in KindTable(_kind).select_until_spent(objects, budget):
            if kind == "tensor":
                with suppress(RuntimeError, AttributeError):
                    storage = TensorBase.untyped_storage(value)
                    # Once for each storage, because several tensors can be views of one.
                    sizes[int(storage._cdata)] = int(storage.nbytes())
    return None if budget.spent else sum(sizes.values())


def parts_of(tensor: Any) -> tuple[Any, ...]:
    """Return the tensors that have a tensor's storages: the tensor itself, or a sparse one's parts."""
    layout = TensorBase.layout.__get__(tensor)
    if layout is torch.sparse_coo:
        return TensorBase._values(tensor), TensorBase._indices(tensor)
    if layout in _BY_ROWS:
        return (
            TensorBase.values(tensor),
            TensorBase.crow_indices(tensor),
            TensorBase.col_indices(tensor),
        )
    return (tensor,)


def shown_bytes(tensor: Any) -> int:
    """Return the bytes of a tensor's elements. A view of a larger tensor has fewer than its storage."""
    return sum(int(part.numel()) * int(part.element_size()) for part in parts_of(tensor))


def gradient_of(one: Any) -> Any:
    """Return a parameter's gradient; ``None`` if there is none, or ``one`` is no tensor."""
    return TensorBase.grad.__get__(one) if is_kind(one, torch.Tensor) else None


def storage_of(tensor: Any) -> int:
    """Return the identity of a tensor's storage; 0 if there is none, as in a wrapper of ``torch.func``."""
    storage = tensor_storage(tensor)
    return 0 if storage is None else int(storage._cdata)


def tensor_storage(tensor: Any) -> Any:
    """Return a tensor's storage; ``None`` if there is none, as in a wrapper of ``torch.func``."""
    if TensorBase.layout.__get__(tensor) is not torch.strided:
        return None
    try:
        return TensorBase.untyped_storage(tensor)
    except RuntimeError:
        return None


def _number(node: Any) -> int:
    return int(own_method(node, "_sequence_nr")())


def _kind(kind: type) -> str | None:
    for base in bases(kind):
        if base is torch.Tensor:
            return "tensor"
        # Classes of autograd nodes have no base class in common, but this method, which is written in C.
        if type(class_namespace(base).get("_sequence_nr")) is MethodDescriptorType:
            return "node"
    return None


def is_scalar(one: Any) -> bool:
    """Return whether an object is a tensor without dimensions. Return False for other objects."""
    if not is_kind(one, torch.Tensor):
        return False
    with DisableTorchFunction():
        return bool(TensorBase.ndim.__get__(one) == 0)


_MAX_STATE: Final = 1_000_000
"""Maximum number of values in one parameter's optimizer state that memlog searches for tensors."""


class KnownModels:
    """Parameters and optimizers that exist when this object is made. Those that are made later can be a leak.

    Only the identity of each parameter is kept, without a weak reference. A conversion of a module to another
    type or device can call ``torch.utils.swap_tensors``, which refuses tensors that have weak references.

    ``objects`` are all objects that the collector tracks. ``existing`` has weak references to the storages of
    all tensors that exist when this object is made, by the storage's identity.
    """

    def __init__(self, objects: list[Any], budget: TimeBudget) -> None:
        self.existing: dict[int, weakref.ref[Any]] = {}
        self._parameters: set[int] = set()
        self._optimizers: list[weakref.ref[Any]] = []
        with DisableTorchFunction():
            for value, kind in KindTable(_model_part).select_until_spent(objects, budget):
                if kind is torch.optim.Optimizer:
                    self._optimizers.append(weakref.ref(value))
                else:
                    self._add_tensor(value, kind)

    def _add_tensor(self, tensor: Any, kind: type) -> None:
        if kind is torch.nn.Parameter:
            self._parameters.add(id(tensor))
        storage = tensor_storage(tensor) if _is_plain(tensor) else None
        if storage is not None:
            self.existing[storage._cdata] = weakref.ref(storage)

    def parameters(self, objects: list[Any], budget: TimeBudget) -> list[Any]:
        """Return the parameters among ``objects`` that existed when this object was made."""
        return [
            value
            for value, kind in KindTable(_model_part).select_until_spent(objects, budget)
            if kind is torch.nn.Parameter and id(value) in self._parameters
        ]

    def storages(self, parameters: list[Any]) -> frozenset[int]:
        """Return the identities of the storages of parameters, their gradients and all optimizers' state."""
        with DisableTorchFunction():
            tensors = itertools.chain(_with_gradients(parameters), self._states())
            return frozenset(storage_of(tensor) for tensor in tensors if _is_plain(tensor))

    def _states(self) -> Iterator[Any]:
        for reference in self._optimizers:
            optimizer = reference()
            state: Any = (instance_dict(optimizer) or {}).get("state")
            # A copy: the program can add a state between two values.
            for owner, values in list(dict.items(state)) if is_kind(state, dict) else ():
                if type(owner) is torch.nn.Parameter and id(owner) not in self._parameters:
                    continue  # a parameter that was made later
                yield from values_in(values, _MAX_STATE)


def gradients_with_graph(parameters: list[Any]) -> list[tuple[Any, Any]]:
    """Return the gradients that have a graph (``create_graph=True``), each with the graph's last node."""
    gradients = []
    with DisableTorchFunction():
        for parameter in parameters:
            gradient = TensorBase.grad.__get__(parameter)
            node = None if gradient is None else TensorBase.grad_fn.__get__(gradient)
            if node is not None:
                gradients.append((gradient, node))
    return gradients


def _with_gradients(parameters: list[Any]) -> Iterator[Any]:
    for parameter in parameters:
        yield parameter
        gradient = TensorBase.grad.__get__(parameter)
        if gradient is not None:
            yield gradient


def _model_part(kind: type) -> type | None:
    for base in bases(kind):
        for wanted in (torch.nn.Parameter, torch.optim.Optimizer, torch.Tensor):
            if base is wanted:
                return wanted
    return None


def _is_plain(tensor: Any) -> bool:
    return type(tensor) is torch.Tensor or type(tensor) is torch.nn.Parameter


def views_of(
    objects: list[Any], tensors: Sequence[Any], huge: AbstractSet[int], budget: TimeBudget
) -> dict[int, list[Any]]:
    """Return the arrays that share memory with tensors, by the tensor's identity.

    The garbage collector does not track arrays, so a search for referrers does not find arrays as owners.
    ``objects`` are all objects that the collector tracks. ``huge`` has the identities of large
    containers. Arrays that only these containers refer to are not found.
    """
    array = getattr(sys.modules.get("numpy"), "ndarray", None)
    by_owner: dict[int, list[Any]] = {id(tensor): [] for tensor in tensors}
    if array is None or not by_owner:
        return {}
    for batch in budget.batches(objects):
        # One call for the whole batch is much faster than a call for each object.
        referents = gc.get_referents(*(value for value in batch if id(value) not in huge))
        arrays = map(operator.is_, map(type, referents), itertools.repeat(array))
        for view in itertools.compress(referents, arrays):
            owner = id(_memory_owner(view, array))
            if owner in by_owner:
                by_owner[owner].append(view)
    return {owner: arrays for owner, arrays in by_owner.items() if arrays}


def _memory_owner(one: Any, array: Any) -> Any:
    # The base of `tensor.numpy()` is the tensor. The base of a view of an array is an array.
    while type(one) is array:
        one = array.base.__get__(one)
    return one

"""Tensors that every training keeps: parameters, gradients and optimizer state."""

from __future__ import annotations

import itertools
import weakref
from collections.abc import Iterator
from typing import Any, Final

import torch

from memlog._internal.inert_access import bases, instance_dict, is_kind, values_in
from memlog.leaks.kind_table import KindTable
from memlog.leaks.live_tensors import storage_of, tensor_storage
from memlog.leaks.time_budget import TimeBudget

_MAX_STATE: Final = 1_000_000
"""Maximum number of values in one parameter's optimizer state that memlog searches for tensors."""
_base: Any = torch._C.TensorBase


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
        with torch._C.DisableTorchFunction():
            for one, kind in KindTable(_kind).select_until_spent(objects, budget):
                if kind is torch.optim.Optimizer:
                    self._optimizers.append(weakref.ref(one))
                else:
                    self._add_tensor(one, kind)

    def _add_tensor(self, tensor: Any, kind: type) -> None:
        if kind is torch.nn.Parameter:
            self._parameters.add(id(tensor))
        storage = tensor_storage(tensor) if _is_plain(tensor) else None
        if storage is not None:
            self.existing[storage._cdata] = weakref.ref(storage)

    def parameters(self, objects: list[Any], budget: TimeBudget) -> list[Any]:
        """Return the parameters among ``objects`` that existed when this object was made."""
        return [
            one
            for one, kind in KindTable(_kind).select_until_spent(objects, budget)
            if kind is torch.nn.Parameter and id(one) in self._parameters
        ]

    def storages(self, parameters: list[Any]) -> frozenset[int]:
        """Return the identities of the storages of parameters, their gradients and all optimizers' state."""
        with torch._C.DisableTorchFunction():
            tensors = itertools.chain(_with_gradients(parameters), self._states())
            return frozenset(storage_of(tensor) for tensor in tensors if _is_plain(tensor))

    def _states(self) -> Iterator[Any]:
        for reference in self._optimizers:
            optimizer = reference()
            state: Any = (instance_dict(optimizer) or {}).get("state")
            for owner, values in list(dict.items(state)) if is_kind(state, dict) else ():
                if type(owner) is torch.nn.Parameter and id(owner) not in self._parameters:
                    continue  # a parameter that was made later
                yield from values_in(values, _MAX_STATE)


def gradients_with_graph(parameters: list[Any]) -> list[tuple[Any, Any]]:
    """Return the gradients that have a graph (``create_graph=True``), each with the graph's last node."""
    found = []
    with torch._C.DisableTorchFunction():
        for parameter in parameters:
            gradient = _base.grad.__get__(parameter)
            node = None if gradient is None else _base.grad_fn.__get__(gradient)
            if node is not None:
                found.append((gradient, node))
    return found


def _with_gradients(parameters: list[Any]) -> Iterator[Any]:
    for parameter in parameters:
        yield parameter
        gradient = _base.grad.__get__(parameter)
        if gradient is not None:
            yield gradient


def _kind(kind: type) -> type | None:
    for base in bases(kind):
        for one in (torch.nn.Parameter, torch.optim.Optimizer, torch.Tensor):
            if base is one:
                return one
    return None


def _is_plain(tensor: Any) -> bool:
    return type(tensor) is torch.Tensor or type(tensor) is torch.nn.Parameter

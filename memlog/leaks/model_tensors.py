"""Tensors that a training has anyway: parameters, gradients and optimizer state."""

from __future__ import annotations

import weakref
from collections.abc import Iterator
from typing import Any, Final

import torch

from memlog.leaks.inert_access import bases, instance_dict, values_in
from memlog.leaks.kind_table import KindTable
from memlog.leaks.live_tensors import storage_of
from memlog.leaks.time_budget import TimeBudget

_BATCH: Final = 20_000
_MAX_STATE: Final = 1_000_000
"""Values of an optimizer's state that are looked at."""
_base: Any = torch._C.TensorBase


class ModelTensors:
    """Parameters and optimizers that exist now, held weakly. Those that are made later are not normal.

    Args:
        objects: All objects that the collector tracks.
        budget: Time for it.
    """

    def __init__(self, objects: list[Any], budget: TimeBudget) -> None:
        self._parameters: list[weakref.ref[Any]] = []
        self._optimizers: list[weakref.ref[Any]] = []
        self._others: list[weakref.ref[Any]] = []
        kinds = KindTable(self._list_for)
        for batch in budget.batches(objects, _BATCH):
            for one, references in kinds.select(batch):
                references.append(weakref.ref(one))

    def _list_for(self, kind: type) -> list[weakref.ref[Any]] | None:
        for base in bases(kind):
            if base is torch.nn.Parameter:
                return self._parameters
            if base is torch.optim.Optimizer:
                return self._optimizers
            if base is torch.Tensor:
                return self._others
        return None

    def existing(self) -> dict[int, weakref.ref[Any]]:
        """Return the storages of all tensors that existed at the beginning, by identity."""
        found = {}
        with torch._C.DisableTorchFunctionSubclass():
            for tensor in _alive([*self._parameters, *self._others]):
                if any(type(tensor) is kind for kind in _PLAIN) and storage_of(tensor):
                    storage = _base.untyped_storage(tensor)
                    found[storage._cdata] = weakref.ref(storage)
        self._others.clear()
        return found

    def storages(self) -> frozenset[int]:
        """Return the identities of the storages of these parameters, their gradients and their state."""
        with torch._C.DisableTorchFunctionSubclass():
            return frozenset(
                storage_of(tensor)
                for tensor in self._tensors()
                if any(type(tensor) is kind for kind in _PLAIN)
            )

    def gradients_with_graph(self) -> Iterator[tuple[Any, Any]]:
        """Yield the gradients that have a graph (``create_graph=True``), each with its last node."""
        with torch._C.DisableTorchFunctionSubclass():
            for parameter in _alive(self._parameters):
                gradient = _base.grad.__get__(parameter)
                node = None if gradient is None else _base.grad_fn.__get__(gradient)
                if node is not None:
                    yield gradient, node

    def _tensors(self) -> Iterator[Any]:
        known = set()
        for parameter in _alive(self._parameters):
            known.add(id(parameter))
            yield parameter
            gradient = _base.grad.__get__(parameter)
            if gradient is not None:
                yield gradient
        for optimizer in _alive(self._optimizers):
            state = (instance_dict(optimizer) or {}).get("state")
            for owner, values in list(dict.items(state)) if isinstance(state, dict) else ():
                if type(owner) is torch.nn.Parameter and id(owner) not in known:
                    continue  # a parameter that was made later
                found = values_in(values, _MAX_STATE)
                yield from (one for one in found if any(type(one) is kind for kind in _PLAIN))


_PLAIN: Final = (torch.Tensor, torch.nn.Parameter)


def _alive(references: list[weakref.ref[Any]]) -> Iterator[Any]:
    for reference in references:
        one = reference()
        if one is not None:
            yield one

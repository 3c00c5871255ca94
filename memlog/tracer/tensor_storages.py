"""Storages that hold the bytes of a tensor."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, Final, NamedTuple, TypeAlias

import torch
from torch import Tensor
from torch.nn.parameter import is_lazy

from memlog.torchside import internals
from memlog.torchside.tensors import OPAQUE_LAYOUT

Storages: TypeAlias = dict[int, tuple[Any, int]]
"""Storages and their sizes in bytes, by the storage's address in C++. The mapping keeps the storages
alive."""


PLAIN_CLASSES: Final = frozenset((Tensor, torch.nn.Parameter))
"""Classes whose tensors are safe to inspect. Reading an attribute of another class's tensor may run that
class's code."""


def is_wrapper(kind: type) -> bool:
    """Return whether tensors of a class hold other tensors instead of bytes (DTensor, nested tensors)."""
    return kind not in PLAIN_CLASSES and hasattr(kind, "__tensor_flatten__")


def plain_tensors(tensor: Tensor) -> Iterator[Tensor]:
    """Yield the tensors that hold the bytes: the local part of a DTensor, the values of a sparse tensor."""
    plain = type(tensor) in PLAIN_CLASSES
    if plain and tensor.layout is torch.strided:
        yield tensor
    elif not plain and is_wrapper(type(tensor)):
        names = tensor.__tensor_flatten__()[0]  # type: ignore[attr-defined] # checked by is_wrapper()
        for name in names:
            inner = getattr(tensor, name, None)
            if isinstance(inner, Tensor):
                yield from plain_tensors(inner)
    elif tensor.layout is torch.strided:
        yield tensor
    elif tensor.layout is torch.sparse_coo:
        yield tensor._indices()
        yield tensor._values()
    elif tensor.layout is not OPAQUE_LAYOUT:
        compressed_by_rows = tensor.layout in (torch.sparse_csr, torch.sparse_bsr)
        yield tensor.crow_indices() if compressed_by_rows else tensor.ccol_indices()
        yield tensor.col_indices() if compressed_by_rows else tensor.row_indices()
        yield tensor.values()


def storage_tensors(tensor: Tensor) -> Iterator[Tensor]:
    """Yield the tensors that hold the bytes of a tensor.

    Yield nothing for a parameter of a lazy module before the module's first call. A wrapper of ``torch.func``
    has no storage of its own, so the tensor inside the wrapper is yielded instead.
    """
    if internals.is_functorch_wrapper is not None and internals.unwrap_functorch is not None:
        while internals.is_functorch_wrapper(tensor):
            tensor = internals.unwrap_functorch(tensor)
    return iter(()) if is_lazy(tensor) else plain_tensors(tensor)


def has_bytes(storage: Any) -> bool:
    """Return whether a storage has memory. Autograd makes tensors of zeros that have a size but no memory.

    Fake tensors, which ``torch.func.linearize`` makes, have none either. On the CPU they lie on the device
    "meta", and torch warns about reading their address.
    """
    try:
        return storage.device.type != "meta" and bool(storage.data_ptr())
    except RuntimeError:
        return False  # torch raises for a storage with a size and no memory


def tensors_in(values: Any, limit: int = 1000) -> list[Tensor]:
    """Return the tensors in nested tuples, lists and dictionaries. Look at no more than ``limit`` values."""
    if type(values) in PLAIN_CLASSES:
        return [values]
    tensors: list[Tensor] = []
    waiting = [values]
    while waiting and limit > 0:
        limit -= 1
        value = waiting.pop()
        if isinstance(value, Tensor):
            tensors.append(value)
        elif isinstance(value, dict):
            # The last value of the list is taken first.
            waiting.extend(reversed(value.values()))
        elif isinstance(value, (tuple, list)):
            waiting.extend(reversed(value))
    return tensors


def is_sparse(value: Any) -> bool:
    """Return whether a value is a tensor that keeps indices and values in other tensors."""
    return isinstance(value, Tensor) and value.layout is not torch.strided


def storages_in(values: Any) -> Storages:
    storages = (plain.untyped_storage() for plain in _plain_tensors_in(values))
    return {storage._cdata: (storage, storage.nbytes()) for storage in storages}


def changed(values: Any, before: Storages) -> list[Tensor]:
    """Return the plain tensors in ``values`` with a storage that is new or resized since ``before``."""
    tensors = []
    for plain in _plain_tensors_in(values):
        storage = plain.untyped_storage()
        known = before.get(storage._cdata)
        if known is None or known[1] != storage.nbytes():
            tensors.append(plain)
    return tensors


def _plain_tensors_in(values: Any) -> Iterator[Tensor]:
    return (plain for tensor in tensors_in(values) for plain in plain_tensors(tensor))


class StateTensor(NamedTuple):
    """A tensor of an optimizer's state, and the ``parameter`` under which the optimizer keeps the tensor.

    ``shared``: True if the state belongs to all parameters. LBFGS keeps such state under the first parameter.
    """

    parameter: Any
    shared: bool
    tensor: Tensor


def optimizer_tensors(optimizer: Any) -> Iterator[StateTensor]:
    # A copy, since a step on another thread may change the dictionary.
    states = list(optimizer.state.items())
    alone = len(states) == 1 and sum(len(group["params"]) for group in optimizer.param_groups) > 1
    for parameter, values in states:
        if isinstance(values, dict):
            tensors = tensors_in(list(values.values()))
            shared = alone and any(tensor.numel() > parameter.numel() for tensor in tensors)
            for tensor in tensors:
                yield StateTensor(parameter, shared, tensor)


def parameters_of(optimizer: Any) -> Iterator[Tensor]:
    for group in optimizer.param_groups:
        yield from group["params"]

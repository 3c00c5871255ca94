"""From a tensor to the storages that hold its bytes."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, NamedTuple, TypeAlias

import torch
from torch import Tensor
from torch.nn.parameter import is_lazy

from memlog.tracer import torch_private

_MAX_NESTING = 4

Storages: TypeAlias = dict[int, tuple[Any, int]]
"""By identity: storages, which live as long as this does, and their sizes in bytes."""


def is_wrapper(kind: type) -> bool:
    """Whether tensors of that class hold others (DTensor, nested tensors) rather than bytes."""
    return hasattr(kind, "__tensor_flatten__")


def plain_tensors(tensor: Tensor, nesting: int = 0) -> Iterator[Tensor]:
    """The tensors that hold the bytes: the local part of a DTensor, the values of a sparse one."""
    if is_wrapper(type(tensor)) and nesting < _MAX_NESTING:
        names = tensor.__tensor_flatten__()[0]  # type: ignore[attr-defined] # is_wrapper() has looked
        for name in names:
            inner = getattr(tensor, name, None)
            if isinstance(inner, Tensor):
                yield from plain_tensors(inner, nesting + 1)
    elif tensor.layout is torch.strided:
        yield tensor
    elif tensor.layout is torch.sparse_coo:
        yield tensor._indices()
        yield tensor._values()
    elif tensor.layout is not torch._mkldnn:  # type: ignore[attr-defined] # opaque: nobody can tell
        compressed_by_rows = tensor.layout in (torch.sparse_csr, torch.sparse_bsr)
        yield tensor.crow_indices() if compressed_by_rows else tensor.ccol_indices()
        yield tensor.col_indices() if compressed_by_rows else tensor.row_indices()
        yield tensor.values()


def storage_tensors(tensor: Tensor) -> Iterator[Tensor]:
    """As `plain_tensors`, for a tensor that may be more than what an operation returns.

    A parameter of a lazy module that was not called yet holds nothing; a level that a transformation of
    ``torch.func`` has put around a tensor has no storage of its own.
    """
    if (
        torch_private.is_functorch_wrapper is not None
        and torch_private.unwrap_functorch is not None
    ):
        while torch_private.is_functorch_wrapper(tensor):
            tensor = torch_private.unwrap_functorch(tensor)
    return iter(()) if is_lazy(tensor) else plain_tensors(tensor)


def tensors_in(values: Any, limit: int = 1000) -> list[Tensor]:
    """The tensors in a module's arguments, in tuples, lists and mappings too.

    Args:
        values: Anything.
        limit: Values that are looked at, at most.
    """
    found: list[Tensor] = []
    waiting = [values]
    while waiting and limit > 0:
        limit -= 1
        value = waiting.pop()
        if isinstance(value, Tensor):
            found.append(value)
        elif isinstance(value, dict):
            waiting.extend(value.values())
        elif isinstance(value, (tuple, list)):
            waiting.extend(value)
    return found


def is_sparse(value: Any) -> bool:
    """Whether it is a tensor that holds others for its indices and values."""
    return isinstance(value, Tensor) and value.layout is not torch.strided


def storages_in(values: Any) -> Storages:
    """The storages of the tensors in an operation's arguments."""
    found: Storages = {}
    for tensor in tensors_in(values):
        for plain in plain_tensors(tensor):
            storage = plain.untyped_storage()
            found[storage._cdata] = storage, storage.nbytes()
    return found


def changed(values: Any, before: Storages) -> list[Tensor]:
    """The plain tensors in ``values`` whose storage is none of those from before, or of another size."""
    found = []
    for tensor in tensors_in(values):
        for plain in plain_tensors(tensor):
            storage = plain.untyped_storage()
            known = before.get(storage._cdata)
            if known is None or known[1] != storage.nbytes():
                found.append(plain)
    return found


class StateTensor(NamedTuple):
    """A tensor of an optimizer's state.

    Attributes:
        parameter: The one that the optimizer keeps it with.
        shared: Whether it is of all the optimizer's parameters: LBFGS keeps all its state with the first.
        tensor: It.
    """

    parameter: Any
    shared: bool
    tensor: Tensor


def optimizer_tensors(optimizer: Any) -> Iterator[StateTensor]:
    """Each tensor of an optimizer's state."""
    # Copied: a step on another thread may change them.
    states = list(optimizer.state.items())
    alone = len(states) == 1 and sum(len(group["params"]) for group in optimizer.param_groups) > 1
    for parameter, values in states:
        if isinstance(values, dict):
            tensors = tensors_in(list(values.values()))
            shared = alone and any(tensor.numel() > parameter.numel() for tensor in tensors)
            for tensor in tensors:
                yield StateTensor(parameter, shared, tensor)


def parameters_of(optimizer: Any) -> Iterator[Tensor]:
    """The parameters that an optimizer steps."""
    for group in optimizer.param_groups:
        yield from group["params"]

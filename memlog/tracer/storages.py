"""From a tensor to the storages that hold its bytes."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any

import torch
from torch import Tensor
from torch.nn.parameter import is_lazy

from memlog.tracer import private

_MAX_NESTING = 4


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


def held_by(tensor: Tensor) -> Iterator[Tensor]:
    """As `plain_tensors`, for a tensor that may be more than what an operation returns.

    A parameter of a lazy module that was not called yet holds nothing; a level that a transformation of
    ``torch.func`` has put around a tensor has no storage of its own.
    """
    if private.is_level is not None and private.below_level is not None:
        while private.is_level(tensor):
            tensor = private.below_level(tensor)
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


def optimizer_tensors(optimizer: Any) -> Iterable[tuple[Any, Tensor]]:
    """Each tensor of an optimizer's state, with the parameter that it belongs to."""
    # Copied: a step on another thread may change them.
    for parameter, values in list(optimizer.state.items()):
        if isinstance(values, dict):
            for value in tensors_in(list(values.values())):
                yield parameter, value


def parameters_of(optimizer: Any) -> Iterator[Tensor]:
    """The parameters that an optimizer steps."""
    for group in optimizer.param_groups:
        yield from group["params"]

"""Buffers that collectives, and FSDP's copies beside them, allocate inside themselves.

On a CUDA device, NCCL works in the program's tensors. On the CPU, gloo works in copies. The rules for gloo
are those of ``ProcessGroupGloo.cpp`` in torch 2.13, and are tested against two real ranks.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager
from typing import Any, Final, TypeAlias

from torch import Tensor
from torch.utils._pytree import tree_leaves

from memlog.estimates.real_tensors import bytes_of
from memlog.tracer.engines.cpu import op_workspace
from memlog.tracer.engines.cpu.op_workspace import Workspace

_NAMESPACES: Final = ("c10d", "_c10d_functional", "c10d_functional", "fsdp")
_NONE: Final = Workspace(0, 0)
_Rule: TypeAlias = Callable[[Any, Any], int]
"""Function of a call's positional and keyword arguments that returns the bytes of the buffers."""


def counted(*, on_cpu: bool) -> AbstractContextManager[None]:
    """Inside the block, count what collectives allocate inside themselves: gloo's, or NCCL's (nothing)."""
    return op_workspace.of_unmeasured(inside_gloo if on_cpu else _of_nccl)


def _of_nccl(func: Any, _: Any, __: Any) -> Workspace | None:
    return _NONE if getattr(func, "namespace", None) in _NAMESPACES else None


def inside_gloo(func: Any, args: Any, kwargs: Any) -> Workspace | None:
    """Return what an operation allocates inside itself with gloo; ``None``: unknown."""
    schema = getattr(func, "_schema", None)
    rule = None if schema is None else _GLOO.get(schema.name)
    return None if rule is None else Workspace(rule(args, kwargs), 0)


def _nothing(_: Any, __: Any) -> int:
    return 0


def _copy_of(position: int) -> _Rule:
    """Return the rule of a collective that works in a copy of one of its arguments."""
    return lambda args, _: _size(args[position])


def _gathered(args: Any, _: Any) -> int:
    """Return the bytes of what all ranks send, before they are in the result."""
    values, ranks, *_rest = args
    return _size(values) * int(ranks)


def _chunk_cat(args: Any, kwargs: Any) -> int:
    """Return the bytes of gradients that FSDP pads or makes contiguous, and of the sum in their own type.

    On the CPU ``aten::_chunk_cat`` is composed of other operations.
    """
    tensors, dim, chunks = args[:3]
    out = kwargs["out"]
    copies = 0
    for each in tensors:
        padded = -(-each.shape[dim] // chunks) * chunks
        if padded != each.shape[dim] or not each.is_contiguous():
            copies += bytes_of(each) // max(each.shape[dim], 1) * padded
    kind = tensors[0].dtype
    return copies + (0 if kind is out.dtype else out.numel() * kind.itemsize)


def _size(values: Any) -> int:
    return sum(bytes_of(each) for each in tree_leaves(values) if isinstance(each, Tensor))


_GLOO: Final[Mapping[str, _Rule]] = {
    **dict.fromkeys(
        (
            *("c10d::allreduce_", "c10d::alltoall_base_", "c10d::barrier", "c10d::broadcast_"),
            *("c10d::recv_", "c10d::reduce_", "c10d::send"),
            *("_c10d_functional::all_reduce", "_c10d_functional::all_reduce_"),
            *("_c10d_functional::all_to_all_single", "_c10d_functional::broadcast"),
            *("_c10d_functional::broadcast_", "_c10d_functional::wait_tensor"),
            *("fsdp::all_gather_copy_in", "fsdp::split_with_sizes_copy"),
        ),
        _nothing,
    ),
    "c10d::_allgather_base_": _copy_of(0),
    "c10d::_reduce_scatter_base_": _copy_of(1),
    "c10d::allgather_": _copy_of(0),
    "c10d::allreduce_coalesced_": _copy_of(0),
    "_c10d_functional::all_gather_into_tensor": _gathered,
    "_c10d_functional::reduce_scatter_tensor": _copy_of(0),
    "fsdp::chunk_cat": _chunk_cat,
}
"""Rules by an operation's name. What the others allocate, such as the coalesced ones, is unknown."""

"""Workspaces of operations on the CPU, for fake tensors: measured with real ones of a small batch.

oneDNN's convolutions copy their arguments into layouts of their own: a sixth of a UNet's peak. The backward
pass of a batch normalisation takes as much as its input for a moment. A pointwise operation on several types
copies some arguments to another type. A fake operation has no such copies. They grow with the batch, so two
measurements, of batches of two and four, tell those of any batch.
"""

# PyTorch leaves some of these without types.
# mypy: allow-untyped-calls

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import _disable_current_modes
from torch.utils._pytree import tree_map_only

from memlog.errors import ConfigurationError
from memlog.tracer.engines.cpu import op_workspace
from memlog.tracer.engines.cpu.op_workspace import Workspace
from memlog.tracer.torch_private import operation_name

_BATCHES = (2, 4)
_RECURRENT = "mkldnn_rnn_layer"
_OPERATIONS = {"convolution": 1, "convolution_backward": 2, "native_batch_norm_backward": 2}
"""Operations that are measured, and how many of their first arguments have the batch as first dimension.

Another operation may be told the batch's size by a number, and then reads past a smaller tensor's end."""


@contextmanager
def measured_on_small_batches() -> Iterator[None]:
    """Let traces of fake tensors measure workspaces inside the block."""
    with op_workspace.of_fakes(_workspace):
        yield


def _workspace(func: Any, args: Any, kwargs: Any) -> Workspace | None:
    """Return the workspace of an operation on fake tensors; ``None`` if it can't be measured."""
    name = operation_name(func).rstrip("_")
    if name.startswith(_RECURRENT):
        raise ConfigurationError(
            "what oneDNN's LSTM keeps for its backward pass can't be known without running it: estimate this "
            "model for device='cuda'"
        )
    if name in _OPERATIONS:
        with_batch = args[: _OPERATIONS[name]]
    elif torch.Tag.pointwise in func.tags:
        with_batch = _longest(args)
    else:
        return None
    batch = with_batch[0].shape[0]
    sizes = _BATCHES if batch > _BATCHES[-1] else (batch,)
    found = []
    with _disable_current_modes(), torch.no_grad():
        for size in sizes:
            one = _measured(func, args, kwargs, {id(tensor): size for tensor in with_batch})
            if one is None:
                return None
            found.append(one)
    first, last = found[0], found[-1]
    steps = (batch - sizes[0]) / max(sizes[-1] - sizes[0], 1)
    return Workspace(*(round(a + (b - a) * steps) for a, b in zip(first, last, strict=True)))


def _longest(args: Any) -> list[Tensor]:
    """Return the arguments of a pointwise operation whose first dimension is the result's."""
    tensors = [value for value in args if isinstance(value, Tensor)]
    longest = max((tensor.ndim, tensor.shape[:1]) for tensor in tensors)
    return [tensor for tensor in tensors if (tensor.ndim, tensor.shape[:1]) == longest]


def _measured(func: Any, args: Any, kwargs: Any, batches: dict[int, int]) -> Workspace | None:
    def real(tensor: Tensor) -> Tensor:
        shape = list(tensor.shape)
        if id(tensor) in batches:
            shape[0] = batches[id(tensor)]
        return torch.empty_strided(shape, _strides(tensor, shape), dtype=tensor.dtype).zero_()

    given, named = tree_map_only(Tensor, real, (args, kwargs))
    return op_workspace.run(func, given, named)[1]


def _strides(tensor: Tensor, shape: list[int]) -> list[int]:
    """Return strides for another shape, with the tensor's order of dimensions (such as channels last)."""
    strides, step = [0] * len(shape), 1
    for dimension in sorted(range(len(shape)), key=lambda at: (tensor.stride(at), -at)):
        strides[dimension] = step
        step *= shape[dimension]
    return strides

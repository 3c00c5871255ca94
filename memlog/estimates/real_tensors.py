"""Creation of real tensors with the memory layout of fake tensors. The dimensions can have other lengths."""

from __future__ import annotations

from collections.abc import Sequence
from math import prod
from typing import Final

import torch
from torch import Tensor

from memlog._internal.terminal import MIB

MAX_REAL_BYTES: Final = 32 * MIB
"""Maximum total bytes of the real tensors on which an estimate runs an operation."""


def real_tensor(tensor: Tensor, shape: Sequence[int]) -> Tensor:
    """Return zeros with the layout and type of a tensor, and the lengths in ``shape``."""
    strides = _strides(tensor, shape)
    return torch.zeros(extent(shape, strides), dtype=tensor.dtype).as_strided(shape, strides)


def bytes_of(tensor: Tensor, shape: Sequence[int] | None = None) -> int:
    """Return the bytes of ``real_tensor(tensor, shape)``. By default, use the tensor's own shape."""
    shape = tensor.shape if shape is None else shape
    return extent(shape, _strides(tensor, shape)) * tensor.itemsize


def extent(shape: Sequence[int], strides: Sequence[int]) -> int:
    """Return the length, in values, of the memory that a tensor spans. Gaps between its values count, too."""
    if 0 in shape:
        return 0
    return 1 + sum((side - 1) * stride for side, stride in zip(shape, strides, strict=True))


def _strides(tensor: Tensor, shape: Sequence[int]) -> list[int]:
    """Return strides for the lengths in ``shape``. The dimensions keep the tensor's order in memory."""
    strides = tensor.stride()
    found = []
    for stride in strides:
        inner = [at for at, one in enumerate(strides) if 0 < one < stride]
        # A slice of no values, such as `x[:, :0]`, has the strides of `x`.
        before = prod(tensor.shape[at] for at in inner) or 1
        found.append(stride * prod(shape[at] for at in inner) // before)
    return found

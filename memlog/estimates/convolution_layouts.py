"""Layouts in which convolutions on a CUDA device return their results.

On the CPU, torch chooses other layouts, for example for convolutions in groups. Source: ``ConvUtils.h`` in
torch's ``aten/src/ATen/native``.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Final

import torch
from torch import Tensor

_LAST: Final = {4: torch.channels_last, 5: torch.channels_last_3d}
_of_cudnn = False


@contextmanager
def of_cudnn() -> Iterator[None]:
    """Inside the block, estimates give the results of convolutions cuDNN's layouts."""
    global _of_cudnn  # noqa: PLW0603 - the mode of fake tensors takes no argument for it
    _of_cudnn = True
    try:
        yield
    finally:
        _of_cudnn = False


def are_of_cudnn() -> bool:
    return _of_cudnn


def layout_of_results(values: Tensor, weight: Tensor) -> torch.memory_format:
    """Return the layout in which cuDNN computes (``cudnn_conv_suggest_memory_format``)."""
    doubles = torch.float64 in (values.dtype, weight.dtype)
    last = _LAST.get(weight.ndim)
    if last is None or doubles or last not in (suggested(values), suggested(weight)):
        return torch.contiguous_format
    return last


def suggested(tensor: Tensor) -> torch.memory_format:
    """Return the layout of a tensor (``suggest_memory_format``)."""
    last = _LAST.get(tensor.ndim)
    return last if last is not None and _is_last(tensor) else torch.contiguous_format


def _is_last(tensor: Tensor) -> bool:
    """Return whether the strides are those of channels that lie side by side (``is_channels_last_strides``).

    If they are those of both layouts, the channels count as the second dimension.
    """
    shape, strides = tensor.shape, tensor.stride()
    least = 0
    if strides[1] == 0:
        return False
    for dim in (1, *range(tensor.ndim - 1, 1, -1), 0):
        if shape[dim] == 0 or strides[dim] < least or (dim == 0 and least == strides[1]):
            return False
        least = strides[dim] * max(1, shape[dim])
    return True


def strides(shape: torch.Size, layout: torch.memory_format) -> tuple[int, ...]:
    """Return the strides of a new tensor."""
    return torch.empty(shape, device="meta", memory_format=layout).stride()

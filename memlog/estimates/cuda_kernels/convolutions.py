"""Buffers of convolutions on CUDA, without the workspaces that cuDNN chooses.

Sources: ``Convolution.cpp`` and ``cudnn/ConvShared.cpp`` in torch's ``aten/src/ATen/native``.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Final

import torch
from torch import Tensor

from memlog.estimates.convolution_layouts import layout_of_results, suggested
from memlog.estimates.cuda_kernels.call import (
    Blocks,
    Call,
    Temporaries,
    bytes_of,
)
from memlog.estimates.cuda_kernels.reductions import reduced, sums
from memlog.tracer.engines.cpu.op_workspace import RESULTS

_IMAGES: Final = (4, 5)
"""Dimensions of the inputs of a convolution in two or three dimensions."""


def _convolution(call: Call) -> Blocks:
    values, weight = call["input"], call["weight"]
    layout = layout_of_results(values, weight)
    before, after = _copied(values, layout), _copied(weight, layout)
    return (*_some(before), RESULTS, *_around(after), *_some(-before))


def _convolution_backward(call: Call) -> Blocks:
    """Return copies in cuDNN's layout, and the buffers of the sum that is the bias's gradient."""
    gradient, values, weight = call["grad_output"], call["input"], call["weight"]
    for_input, for_weight, for_bias = call["output_mask"]
    layout = layout_of_results(values, weight)
    whole = call["transposed"] or suggested(values) is not suggested(gradient)
    first = (_copied(values, layout), _copied(gradient, layout) if whole else 0)
    again = 0 if whole else _copied(gradient, layout)
    parts: Blocks = ()
    if for_input:
        parts += (RESULTS, *_around(_copied(weight, layout), again))
    if for_weight:
        parts += (*_some(again), RESULTS, *_some(-again))
    after = tuple(-size for size in reversed(_some(*first)))
    if for_bias:
        dims = (0, *range(2, gradient.ndim))
        kernel = sums(gradient.dtype, gradient.dtype)
        bias = reduced(call.gpu, gradient, dims, kernel, gradient.element_size())
        after += (RESULTS, *bias)
    return (*_some(*first), *parts, *after)


def _some(*sizes: int) -> Blocks:
    """Return the sizes of copies that are made."""
    return tuple(size for size in sizes if size)


def _around(*sizes: int) -> Blocks:
    given = _some(*sizes)
    return (*given, *(-size for size in reversed(given)))


def _copied(tensor: Tensor, layout: torch.memory_format) -> int:
    return 0 if tensor.is_contiguous(memory_format=layout) else bytes_of(tensor)


def _order(call: Call) -> tuple[int, ...]:
    """Return the order of the gradients: torch's own kernel, without cuDNN, first takes the weight's."""
    values, weight = call["input"], call["weight"]
    own = (
        not call["transposed"]
        and values.ndim in _IMAGES
        and values.shape[1] == call["groups"] > 1
        and values.dtype is not torch.float16
        and layout_of_results(values, weight) is torch.contiguous_format
    )
    return (1, 0, 2) if own and all(call["output_mask"][:2]) else ()


TEMPORARIES: Final[dict[str, Temporaries]] = {
    "convolution": _convolution,
    "convolution_backward": _convolution_backward,
}
ORDERS: Final[dict[str, Callable[[Call], tuple[int, ...]]]] = {"convolution_backward": _order}
"""Functions that return `Workspace.order`."""

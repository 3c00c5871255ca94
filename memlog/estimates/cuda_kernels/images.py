"""Copies that torch's CUDA kernels for images make of arguments with another layout.

Sources, in torch's ``aten/src/ATen/native/cuda``: ``DilatedMaxPool2d.cu``, ``AdaptiveMaxPooling2d.cu``,
``AveragePool3d.cu``, ``AdaptiveAveragePooling3d.cu``, ``ReflectionPad.cu``, ``Im2Col.cu`` and
``UpSample….cu``; ``AffineGridGenerator.cpp`` in ``aten/src/ATen/native``.
"""

from __future__ import annotations

from math import prod
from typing import Final

import torch
from torch import Tensor

from memlog.estimates.convolution_layouts import suggested
from memlog.estimates.cuda_kernels.call import (
    NONE,
    Blocks,
    Call,
    Temporaries,
    around_results,
    beside,
    bytes_of,
    copy_bytes,
)
from memlog.tracer.engines.cpu.op_workspace import RESULTS


def _copied(tensor: Tensor, layout: torch.memory_format) -> int:
    return 0 if tensor.is_contiguous(memory_format=layout) else bytes_of(tensor)


def _largest(call: Call) -> Blocks:
    values = call["self"]
    return beside(_copied(values, suggested(values)))


def _largest_backward(call: Call) -> Blocks:
    values, gradient = call["self"], call["grad_output"]
    layout = suggested(values)
    return beside(_copied(gradient, layout), _copied(values, layout))


def _copied_after(call: Call) -> Blocks:
    return beside(copy_bytes(call.first))


def _gradient(call: Call) -> Blocks:
    gradient = call.first
    return beside(_copied(gradient, suggested(gradient)))


def _pooled_backward(call: Call) -> Blocks:
    return beside(_copied(call["grad_output"], suggested(call["self"])))


def _adaptive_averages_backward(call: Call) -> Blocks:
    """Return a copy of the gradient. The kernel for channels that lie side by side reads any gradient."""
    by_rows = suggested(call["self"]) is torch.contiguous_format
    return beside(copy_bytes(call["grad_output"])) if by_rows else NONE


def _resized(call: Call) -> Blocks:
    """Return a contiguous result, which is copied into the result, and a copy of the images."""
    return beside(copy_bytes(call.out), copy_bytes(call.first))


def _adaptive_largest(call: Call) -> Blocks:
    return beside(*map(copy_bytes, (*call.out, call["self"])))


def _columns(call: Call) -> Blocks:
    """Return a copy, and a tensor with the input's shape, which is resized to become the result."""
    values = call["self"]
    before = bytes_of(values) if bytes_of(call.out) > bytes_of(values) else 0
    return around_results(before, copy_bytes(values))


def _grid(call: Call) -> Blocks:
    """Return the grid before the product with the matrices, and what computes the steps of each axis."""
    samples, _, *sides = call["size"]
    itemsize = call["theta"].element_size()
    grid = samples * prod(sides) * (len(sides) + 1) * itemsize
    of_axis = 1 if call["align_corners"] else 3
    axes: Blocks = ()
    for side in reversed(sides):
        axes += beside(*[side * itemsize] * (of_axis if side > 1 else 1))
    return (grid, *axes, RESULTS, -grid)


_COPY_FIRST: Final = """
    upsample_nearest1d _upsample_nearest_exact1d upsample_nearest1d_backward
    _upsample_nearest_exact1d_backward upsample_linear1d_backward upsample_bicubic2d_backward
    _upsample_bilinear2d_aa_backward _upsample_bicubic2d_aa_backward upsample_nearest3d_backward
    _upsample_nearest_exact3d_backward reflection_pad1d reflection_pad2d reflection_pad3d
    reflection_pad1d_backward reflection_pad2d_backward avg_pool3d avg_pool3d_backward
    _adaptive_avg_pool3d_backward adaptive_max_pool3d adaptive_max_pool3d_backward
    fractional_max_pool2d_backward col2im
"""
"""Operations that copy their first argument, unless it is contiguous."""
_RESIZE: Final = """
    upsample_nearest3d _upsample_nearest_exact3d _upsample_bilinear2d_aa _upsample_bicubic2d_aa
"""
_RESIZE_BACKWARD: Final = """
    upsample_nearest2d_backward _upsample_nearest_exact2d_backward upsample_bilinear2d_backward
"""
TEMPORARIES: Final[dict[str, Temporaries]] = {
    **dict.fromkeys(_COPY_FIRST.split(), _copied_after),
    **dict.fromkeys(_RESIZE.split(), _resized),
    **dict.fromkeys(_RESIZE_BACKWARD.split(), _gradient),
    "max_pool2d_with_indices": _largest,
    "max_pool2d_with_indices_backward": _largest_backward,
    "max_pool3d_with_indices_backward": _pooled_backward,
    "avg_pool2d_backward": _pooled_backward,
    "_adaptive_avg_pool2d_backward": _adaptive_averages_backward,
    "_adaptive_avg_pool3d": lambda call: around_results(copy_bytes(call.first)),
    "adaptive_max_pool2d": _adaptive_largest,
    "adaptive_max_pool2d_backward": lambda call: beside(
        *map(copy_bytes, (call["grad_output"], call["indices"], call.out))
    ),
    "upsample_trilinear3d_backward": lambda call: beside(
        copy_bytes(call["grad_output"]), copy_bytes(call.out)
    ),
    "im2col": _columns,
    "affine_grid_generator": _grid,
}

"""Buffers of layers on CUDA: norms, convolutions without cuDNN's workspaces, images, products of matrices.

On the CPU, torch chooses other layouts, for example for convolutions in groups. Source: ``ConvUtils.h`` in
torch's ``aten/src/ATen/native``.

Sources, in torch's ``aten/src/ATen/native``: ``cuda/SoftMax.cu``, ``cuda/layer_norm_kernel.cu``,
``cuda/group_norm_kernel.cu`` and ``cuda/Normalization.cuh``.

Sources: ``Convolution.cpp`` and ``cudnn/ConvShared.cpp`` in torch's ``aten/src/ATen/native``.

Sources, in torch's ``aten/src/ATen/native/cuda``: ``DilatedMaxPool2d.cu``, ``AdaptiveMaxPooling2d.cu``,
``AveragePool3d.cu``, ``AdaptiveAveragePooling3d.cu``, ``ReflectionPad.cu``, ``Im2Col.cu`` and
``UpSample….cu``; ``AffineGridGenerator.cpp`` in ``aten/src/ATen/native``.

Sources: ``cuda/Blas.cpp`` in torch's ``aten/src/ATen/native``.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from math import prod
from typing import Final

import torch
from torch import Tensor

from memlog.estimates.cuda_kernels.reductions import (
    NONE,
    Blocks,
    Call,
    Temporaries,
    around_results,
    beside,
    bytes_of,
    copy_bytes,
    reduced,
    sums,
)
from memlog.tracer.engines.op_workspace import RESULTS

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
    # A broadcast channel dimension is the default layout.
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


_HALF: Final = (torch.float16, torch.bfloat16)


def accumulated(dtype: torch.dtype) -> int:
    """Return the bytes of the type in which kernels accumulate values of a type."""
    return 4 if dtype in _HALF else dtype.itemsize


def _softmax(call: Call) -> Blocks:
    size = copy_bytes(call.first)
    return beside(size)


def _softmax_backward(call: Call) -> Blocks:
    """Return the product of the gradient and the result, with copies unless they are stored by rows."""
    gradient, output = call["grad_output"], call["output"]
    if not gradient.numel():
        return NONE
    size = max(gradient.numel() * gradient.element_size(), bytes_of(output))
    product = 0
    if not gradient.is_contiguous():
        # On the device `meta`, torch chooses the product's layout and allocates nothing.
        on_meta = (
            torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype, device="meta")
            for tensor in (gradient, output)
        )
        product = copy_bytes(torch.mul(*on_meta))
    return beside(size, product, copy_bytes(output))


def _safe_softmax(call: Call) -> Blocks:
    """Return which scores are minus infinity, and for which rows all are (``_safe_softmax``)."""
    scores = call.first
    rows = scores.numel() // max(1, scores.shape[call["dim"]] if scores.ndim else 1)
    itemsize = call.out.element_size()
    return (scores.numel(), rows, itemsize, -itemsize, -rows, -scores.numel())


def _log_softmax_backward(call: Call) -> Blocks:
    return beside(copy_bytes(call["grad_output"]), copy_bytes(call["output"]))


_TILE_ROWS: Final = 32
_MANY_ROWS: Final = 64 * 1024


def _layer_norm(call: Call) -> Blocks:
    return around_results(copy_bytes(call["input"]), copy_bytes(call["weight"]))


def _layer_norm_backward(call: Call) -> Blocks:
    """Return copies, and partial sums of the weight's gradient if there are many short rows."""
    gradient, values = call["grad_out"], call["input"]
    columns = 1
    for length in call["normalized_shape"]:
        columns *= length
    rows = values.numel() // max(1, columns)
    before, after = copy_bytes(values), copy_bytes(gradient)
    inside: Blocks = ()
    # If there are many rows and few columns, several blocks of threads share the rows, and their sums are
    # added (``LaunchGammaBetaBackwardCUDAKernel``).
    if rows > _MANY_ROWS and columns // _TILE_ROWS < call.gpu.processors // 2:
        inside = _partial_sums(call, rows, columns)
    made = () if inside and not call["output_mask"][0] else (RESULTS,)
    if not (before or after or inside):
        return NONE
    first = (*((before,) if before else ()), *made, *((after,) if after else ()))
    return (*first, *inside, *(-size for size in reversed(first) if size))


def _partial_sums(call: Call, rows: int, columns: int) -> Blocks:
    parts = -(-rows // _TILE_ROWS)
    weights = [
        parameter
        for parameter, wanted in zip(
            (call["weight"], call["bias"]), call["output_mask"][1:], strict=True
        )
        if wanted
    ]
    weights = [parameter for parameter in weights if parameter is not None]
    sizes = [
        (columns * parameter.element_size(), parts * columns * parameter.element_size())
        for parameter in weights
    ]
    first: Blocks = tuple(size for size, _ in sizes) + tuple(size for _, size in sizes)
    for parameter, (size, _) in zip(weights, sizes, strict=True):
        matrix = torch.empty(parts, columns, dtype=parameter.dtype, device="meta")
        kernel = sums(parameter.dtype, parameter.dtype)
        first += (
            RESULTS,
            *reduced(call.gpu, matrix, (0,), kernel, parameter.element_size()),
            -size,
        )
    return first + tuple(-size for _, size in reversed(sizes))


def _group_norm(call: Call) -> Blocks:
    values, weight, bias = call["input"], call["weight"], call["bias"]
    samples, channels, pixels, groups = call["N"], call["C"], call["HxW"], call["group"]
    size = accumulated(values.dtype)
    if not values.numel():
        return NONE
    # The kernel also stores the means and deviations of 16-bit values as float32.
    halves: tuple[int, ...] = ()
    if values.dtype in _HALF and (weight is None or weight.dtype is values.dtype):
        halves = (samples * groups * size,) * 2
    # Only the general kernel computes a scale and a shift for each channel first. torch uses others for one
    # pixel, and without weight and bias.
    scales = (
        () if pixels == 1 or (weight is None and bias is None) else (samples * channels * size,) * 2
    )
    return beside(*halves, *scales)


def _group_norm_backward(call: Call) -> Blocks:
    values, weight = call["input"], call["weight"]
    samples, channels, pixels, groups = call["N"], call["C"], call["HxW"], call["group"]
    if not values.numel():
        return NONE
    size = accumulated(values.dtype)
    # ``ds`` and ``db``, sums over the pixels of each channel; ``c2`` and ``c3``, factors of each group.
    per_channel, per_group = samples * channels * size, samples * groups * size
    inner: tuple[int, ...] = ()
    if call["output_mask"][0]:
        weighted = (per_channel,) if weight is not None and pixels > 1 else ()
        inner = (per_group, per_group, *weighted)
        inner += (-per_group, -per_group, *(-part for part in weighted))
    return (per_channel, per_channel, *inner, -per_channel, -per_channel)


_CHANNELS_LAST: Final = {4: torch.channels_last, 5: torch.channels_last_3d}
_THREADS, _TILE, _PER_THREAD, _MOST_ROWS = 512, 32, 16, 128


def _channels_last_grid(rows: int, channels: int) -> tuple[int, int]:
    """Return the numbers of blocks (``flexible_launch_configs`` in ``Normalization.cuh``)."""
    width = min(_power_of_two(channels), _TILE)
    height = min(_power_of_two(-(-rows // _PER_THREAD)), _THREADS // width)
    if width * height != _THREADS:
        width = min(_power_of_two(channels), _THREADS // height)
    parts = min(-(-rows // (height * _PER_THREAD)), _MOST_ROWS)
    # torch does not let fewer blocks share channels, because adding their results would take longer.
    return -(-channels // width), parts if parts >= 8 else 1  # noqa: PLR2004


def _power_of_two(number: int) -> int:
    return 1 << max(0, number.bit_length() - 1)


def _is_channels_last(tensor: Tensor) -> bool:
    layout = _CHANNELS_LAST.get(tensor.ndim)
    if layout is not None and tensor.is_contiguous(memory_format=layout):
        return True
    return tensor.is_contiguous() and tensor.stride(1) == 1


def by_cudnn(values: Tensor, weight: Tensor | None, *, trains: bool) -> bool:
    """Return whether torch lets cuDNN normalise a batch (``_select_batch_norm_backend``)."""
    if weight is None or not trains or values.ndim <= 2:  # noqa: PLR2004
        return False
    types = (values.dtype, weight.dtype)
    return types in ((torch.float32, torch.float32), (torch.float16, torch.float32))


def _in_rows(values: Tensor) -> Blocks:
    """Return the buffers for values of which each channel's are side by side.

    Others are copied at times: their buffers are not known.
    """
    if values.is_contiguous():
        return NONE
    raise NotImplementedError


def _batch_norm(call: Call) -> Blocks:
    values, trains = call["input"], bool(call["training"])
    if by_cudnn(values, call["weight"], trains=trains) or not trains:
        return NONE
    if not _is_channels_last(values):
        return _in_rows(values)
    if values.ndim == 5 and values.dtype in _HALF:  # noqa: PLR2004
        raise NotImplementedError
    channels = values.shape[1]
    columns, parts = _channels_last_grid(values.numel() // channels, channels)
    # Blocks that share channels store partial statistics, and count the blocks that are done.
    if parts == 1:
        return NONE
    return beside(4 * channels * parts * accumulated(values.dtype), 4 * columns)


def _pixels_copied(images: Tensor) -> int:
    """Return the bytes of a copy whose pixels are one dimension; 0 if they can be so without a copy."""
    shape, strides = images.shape, images.stride()
    joined = all(strides[at - 1] == strides[at] * shape[at] for at in range(3, images.ndim))
    return 0 if joined else bytes_of(images)


def _batch_norm_backward(call: Call) -> Blocks:
    values, weight, trains = call["input"], call["weight"], bool(call["train"])
    if by_cudnn(values, weight, trains=trains):
        gradient = call["grad_out"]
        same = gradient.is_contiguous(memory_format=suggested(values))
        return around_results(0 if same else bytes_of(gradient))
    if not trains:
        gradient = call["grad_out"]
        copied = _pixels_copied(gradient)
        by_rows = suggested(values) is torch.contiguous_format
        return around_results(copied) if by_rows else (copied, -copied, RESULTS)
    if not _is_channels_last(values):
        return _in_rows(values) or around_results(_pixels_copied(call["grad_out"]))
    channels, size = values.shape[1], accumulated(values.dtype)
    columns, parts = _channels_last_grid(values.numel() // channels, channels)
    means = (channels * size,) * 2
    staging = (2 * channels * parts * size, 4 * columns) if parts > 1 else ()
    of_weights = (RESULTS, RESULTS) if _order_of_gradients(call) else ()
    return (*means, *of_weights, *beside(*staging), RESULTS, *(-mean for mean in means))


def _order_of_gradients(call: Call) -> tuple[int, ...]:
    """Return the order of the gradients: torch's kernel for channels side by side takes the input's last."""
    values, weight = call["input"], call["weight"]
    own = not by_cudnn(values, weight, trains=bool(call["train"])) and _is_channels_last(values)
    return (1, 2, 0) if own and weight is not None and all(call["output_mask"]) else ()


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


def _readable(rows: int, columns: int, row: int, column: int) -> bool:
    """Return whether the values of rows or of columns are side by side (``prepare_matrix_for_cublas``).

    ``row``, ``column``: Strides.
    """
    return (row == 1 and column >= max(1, rows)) or (column == 1 and row >= max(1, columns))


def _copied_matrices(matrix: Tensor) -> int:
    readable = _readable(*matrix.shape[-2:], *matrix.stride()[-2:])
    return 0 if readable else bytes_of(matrix)


def _product(one: str, other: str) -> Temporaries:
    """Return the function for a product. The second matrix is copied first: cuBLAS counts by columns."""

    def copies(call: Call) -> Blocks:
        return beside(_copied_matrices(call[other]), _copied_matrices(call[one]))

    return copies


TEMPORARIES: Final[dict[str, Temporaries]] = {
    "native_dropout": lambda _: NONE,
    "_softmax": _softmax,
    "_log_softmax": _softmax,
    "_safe_softmax": _safe_softmax,
    "_softmax_backward_data": _softmax_backward,
    "_log_softmax_backward_data": _log_softmax_backward,
    "native_layer_norm": _layer_norm,
    "native_layer_norm_backward": _layer_norm_backward,
    "native_group_norm": _group_norm,
    "native_group_norm_backward": _group_norm_backward,
    "_fused_rms_norm_backward": lambda call: beside(copy_bytes(call["grad_out"])),
    "native_batch_norm": _batch_norm,
    "native_batch_norm_backward": _batch_norm_backward,
    "convolution": _convolution,
    "convolution_backward": _convolution_backward,
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
    "mm": _product("self", "mat2"),
    "bmm": _product("self", "mat2"),
    "addmm": _product("mat1", "mat2"),
    "baddbmm": _product("batch1", "batch2"),
    "mv": lambda call: beside(_copied_matrices(call["self"])),
}


ORDERS: Final[dict[str, Callable[[Call], tuple[int, ...]]]] = {
    "native_dropout": lambda _: (1, 0),
    "native_batch_norm_backward": _order_of_gradients,
    "convolution_backward": _order,
}
"""Functions that return `Workspace.order`. Dropout first allocates its mask."""

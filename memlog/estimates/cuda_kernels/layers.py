"""Buffers of layers on CUDA.

Sources, in torch's ``aten/src/ATen/native``: ``cuda/SoftMax.cu``, ``cuda/layer_norm_kernel.cu``,
``cuda/group_norm_kernel.cu`` and ``cuda/Normalization.cuh``.
"""

from __future__ import annotations

from collections.abc import Callable
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
from memlog.estimates.cuda_kernels.reductions import reduced, sums
from memlog.tracer.engines.cpu.op_workspace import RESULTS

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
        on_meta = (
            torch.empty_strided(each.shape, each.stride(), dtype=each.dtype, device="meta")
            for each in (gradient, output)
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
        one
        for one, wanted in zip((call["weight"], call["bias"]), call["output_mask"][1:], strict=True)
        if wanted
    ]
    weights = [one for one in weights if one is not None]
    sizes = [
        (columns * one.element_size(), parts * columns * one.element_size()) for one in weights
    ]
    first: Blocks = tuple(size for size, _ in sizes) + tuple(size for _, size in sizes)
    for one, (size, _) in zip(weights, sizes, strict=True):
        matrix = torch.empty(parts, columns, dtype=one.dtype, device="meta")
        kernel = sums(one.dtype, one.dtype)
        first += (RESULTS, *reduced(call.gpu, matrix, (0,), kernel, one.element_size()), -size)
    return first + tuple(-size for _, size in reversed(sizes))


def _group_norm(call: Call) -> Blocks:
    values, weight, bias = call["input"], call["weight"], call["bias"]
    samples, channels, pixels, groups = call["N"], call["C"], call["HxW"], call["group"]
    size = accumulated(values.dtype)
    if not values.numel():
        return NONE
    halves: tuple[int, ...] = ()
    if values.dtype in _HALF and (weight is None or weight.dtype is values.dtype):
        halves = (samples * groups * size,) * 2
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
    per_channel, per_group = samples * channels * size, samples * groups * size
    inner: tuple[int, ...] = ()
    if call["output_mask"][0]:
        weighted = (per_channel,) if weight is not None and pixels > 1 else ()
        inner = (per_group, per_group, *weighted)
        inner += (-per_group, -per_group, *(-one for one in weighted))
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
    if parts == 1:
        return NONE
    return beside(4 * channels * parts * accumulated(values.dtype), 4 * columns)


def _pixels_copied(images: Tensor) -> int:
    """Return the bytes of a copy whose pixels are one dimension; 0 if they can be so without a copy."""
    shape, strides = images.shape, images.stride()
    one = all(strides[at - 1] == strides[at] * shape[at] for at in range(3, images.ndim))
    return 0 if one else bytes_of(images)


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
    return (*means, *of_weights, *beside(*staging), RESULTS, *(-one for one in means))


def _order_of_gradients(call: Call) -> tuple[int, ...]:
    """Return the order of the gradients: torch's kernel for channels side by side takes the input's last."""
    values, weight = call["input"], call["weight"]
    own = not by_cudnn(values, weight, trains=bool(call["train"])) and _is_channels_last(values)
    return (1, 2, 0) if own and weight is not None and all(call["output_mask"]) else ()


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
}
ORDERS: Final[dict[str, Callable[[Call], tuple[int, ...]]]] = {
    "native_dropout": lambda _: (1, 0),
    "native_batch_norm_backward": _order_of_gradients,
}
"""Functions that return `Workspace.order`. Dropout first allocates its mask."""

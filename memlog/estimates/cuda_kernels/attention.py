"""Buffers of attention on CUDA.

Sources, in torch's ``aten/src/ATen/native/transformers/cuda``: ``flash_attn/flash_api.cpp``,
``attention_backward.cu`` and ``mem_eff_attention/kernel_backward.h``.
"""

from __future__ import annotations

from math import ceil
from typing import Final

import torch
from torch import Tensor

from memlog.estimates.cuda_kernels.call import (
    NONE,
    Blocks,
    Call,
    Gpu,
    Temporaries,
    beside,
    bytes_of,
    taken,
)
from memlog.tracer.engines.cpu.op_workspace import RESULTS

_HALF: Final = (torch.float16, torch.bfloat16)
_FLOAT: Final = 4
_ROWS, _FULL_ROWS = 64, 128
_SMALL_SHARED_MEMORY: Final = ((8, 6), (8, 7), (8, 9), (12, 0), (12, 1))
_LOCK: Final = 16
"""Bytes of the lock of a tile of the query's gradient."""
_MOST_SPLITS: Final = 128
_ENOUGH_BLOCKS, _ENOUGH_EFFICIENCY = 0.8, 0.85
_LARGE_HEAD: Final = 128
_RANDOM_STATE: Final = 16


def _flash(call: Call) -> Blocks:
    """Return the partial results of a kernel that divides the keys among blocks of threads."""
    query, key = call["query"], call["key"]
    samples, heads, rows, size = query.shape
    if call["dropout_p"]:
        return beside(_RANDOM_STATE)
    columns = 256 if size <= 64 else 128 if size <= _LARGE_HEAD else 64  # noqa: PLR2004
    splits = _splits(
        samples * heads * -(-rows // _ROWS), 2 * call.gpu.processors, -(-key.shape[-2] // columns)
    )
    if splits == 1:
        return NONE
    each = splits * samples * heads * rows * _FLOAT
    sums = each * _rounded_head(size)
    return (each, sums, -each, -sums)


def _splits(blocks: int, processors: int, columns: int) -> int:
    """Return the number of parts into which the keys are divided (``num_splits_heuristic``)."""
    if blocks >= _ENOUGH_BLOCKS * processors:
        return 1
    most = min(_MOST_SPLITS, processors, columns)
    efficiency = {}
    for splits in range(1, most + 1):
        if splits == 1 or -(-columns // splits) != -(-columns // (splits - 1)):
            waves = blocks * splits / processors
            efficiency[splits] = waves / ceil(waves)
    enough = _ENOUGH_EFFICIENCY * max(efficiency.values())
    return min(splits for splits, found in efficiency.items() if found >= enough)


def _flash_backward(call: Call) -> Blocks:
    gradient, query, key = call["grad_out"], call["query"], call["key"]
    samples, heads, rows, size = query.shape
    copies = [_by_rows(each) for each in (gradient, call["out"])]
    all_rows = samples * heads * (-(-rows // _FULL_ROWS) * _FULL_ROWS) * _FLOAT
    inner = [all_rows, all_rows * _rounded_head(size)]
    if key.shape[1] != heads:
        expanded = samples * key.shape[-2] * heads * size * query.element_size()
        inner += [expanded, expanded]
    copies = [size for size in copies if size]
    return (*copies, RESULTS, *taken(inner), *(-size for size in reversed(copies)))


def _rounded_head(size: int) -> int:
    multiple = 32 if size <= _LARGE_HEAD else 64
    return -(-size // multiple) * multiple


def _by_rows(tensor: Tensor) -> int:
    """Return the bytes of a copy that is contiguous with the heads after the rows; 0 if it is so already."""
    return 0 if tensor.transpose(1, 2).is_contiguous() else bytes_of(tensor)


def _efficient(call: Call) -> Blocks:
    """Return the sums of a kernel that can't keep the result of one row in registers."""
    query, value = call["query"], call["value"]
    samples, heads, rows, _ = query.shape
    if query.dtype not in _HALF or value.shape[-1] <= _LARGE_HEAD:
        return NONE
    return beside(samples * rows * heads * value.shape[-1] * _FLOAT)


def _efficient_backward(call: Call) -> Blocks:
    gradient, query, key, value = (call[name] for name in ("grad_out_", "query", "key", "value"))
    samples, heads, rows, size = query.shape
    copied = _by_rows(gradient)
    delta = samples * heads * rows * _FLOAT
    workspace = (
        samples
        * heads
        * _of_one_head(call.gpu, query.dtype in _HALF, rows, key.shape[-2], size, value.shape[-1])
    )
    first: Blocks = (delta,)
    if query.dtype not in _HALF:
        product = gradient.numel() * _FLOAT
        contiguous = delta if heads > 1 and rows > 1 else 0
        first = (
            (product, delta, contiguous, -delta, -product)
            if contiguous
            else (product, delta, -product)
        )
    copies = (copied,) if copied else ()
    return (
        *copies,
        RESULTS,
        *first,
        *(workspace, -delta, -workspace),
        *(-size for size in copies),
    )


def _of_one_head(gpu: Gpu, half: bool, rows: int, keys: int, size: int, value_size: int) -> int:
    """Return the bytes of the workspace of one head (``workspace_strideBH``).

    The sizes of tiles are those of kernels for compute capability 8.0 and newer.
    """
    largest = max(size, value_size)
    wide = half and _ROWS < largest <= _LARGE_HEAD and gpu.capability not in _SMALL_SHARED_MEMORY
    height, width = _ROWS if largest <= _ROWS else _FULL_ROWS, _LARGE_HEAD if wide else _ROWS
    tiles = -(-rows // height) * -(-size // width)
    sums = tiles * (height * width * _FLOAT + _LOCK)
    if half and largest > _LARGE_HEAD:
        sums += sum(
            _up(keys, _ROWS) * _up(each, _LARGE_HEAD) * _FLOAT for each in (size, value_size)
        )
    return sums


def _up(number: int, multiple: int) -> int:
    return -(-number // multiple) * multiple


TEMPORARIES: Final[dict[str, Temporaries]] = {
    "_scaled_dot_product_flash_attention": _flash,
    "_scaled_dot_product_flash_attention_backward": _flash_backward,
    "_scaled_dot_product_efficient_attention": _efficient,
    "_scaled_dot_product_efficient_attention_backward": _efficient_backward,
}

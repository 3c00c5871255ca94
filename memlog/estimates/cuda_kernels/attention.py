"""Attention on CUDA: the kernel that torch chooses, its buffers, and the operations around it.

Sources, in torch's ``aten/src/ATen/native/transformers/cuda``: ``flash_attn/flash_api.cpp``,
``attention_backward.cu`` and ``mem_eff_attention/kernel_backward.h``.

The rules are those of ``cuda/sdp_utils.cpp`` and ``sdp_utils_cpp.h`` in torch's
``aten/src/ATen/native/transformers`` (torch 2.13).

The rules are those of ``attention.cpp`` in torch's ``aten/src/ATen/native/transformers`` (torch 2.13).
torch's CPU build has no kernels for these operations, but knows the shapes of their results.
"""

from __future__ import annotations

from collections.abc import Callable
from enum import Enum, auto
from math import ceil
from typing import Any, Final, NamedTuple

import torch
from torch import Tensor
from torch.nn import functional

from memlog.estimates.cuda_kernels.reductions import (
    NONE,
    Blocks,
    Call,
    Gpu,
    Temporaries,
    beside,
    bytes_of,
    taken,
)
from memlog.tracer.engines.op_workspace import RESULTS

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
    # With dropout, the kernel does not divide the keys. It stores its random state.
    if call["dropout_p"]:
        return beside(_RANDOM_STATE)
    # Keys in a tile (``set_params_splitkv``).
    columns = 256 if size <= 64 else 128 if size <= _LARGE_HEAD else 64  # noqa: PLR2004
    splits = _splits(
        samples * heads * -(-rows // _ROWS), 2 * call.gpu.processors, -(-key.shape[-2] // columns)
    )
    if splits == 1:
        return NONE
    log_sums = splits * samples * heads * rows * _FLOAT
    sums = log_sums * _rounded_head(size)
    return (log_sums, sums, -log_sums, -sums)


def _splits(blocks: int, processors: int, columns: int) -> int:
    """Return the number of parts into which the keys are divided (``num_splits_heuristic``)."""
    if blocks >= _ENOUGH_BLOCKS * processors:
        return 1
    most = min(_MOST_SPLITS, processors, columns)
    efficiency = {}
    for splits in range(1, most + 1):
        # A number of parts counts only if it makes the largest part smaller.
        if splits == 1 or -(-columns // splits) != -(-columns // (splits - 1)):
            waves = blocks * splits / processors
            efficiency[splits] = waves / ceil(waves)
    enough = _ENOUGH_EFFICIENCY * max(efficiency.values())
    return min(splits for splits, ratio in efficiency.items() if ratio >= enough)


def _flash_backward(call: Call) -> Blocks:
    gradient, query, key = call["grad_out"], call["query"], call["key"]
    samples, heads, rows, size = query.shape
    copies = [_by_rows(tensor) for tensor in (gradient, call["out"])]
    all_rows = samples * heads * (-(-rows // _FULL_ROWS) * _FULL_ROWS) * _FLOAT
    inner = [all_rows, all_rows * _rounded_head(size)]
    # The kernel computes the gradients of keys and values for each head of the query. torch adds them up
    # later.
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
    # For 16 bits, the kernel computes `delta` itself. For other types, torch first multiplies the gradient by
    # the output.
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
            _up(keys, _ROWS) * _up(head_size, _LARGE_HEAD) * _FLOAT
            for head_size in (size, value_size)
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


_LARGEST_HEAD: Final = 256
"""Largest size of a head for the flash kernels."""
_LARGEST_WITH_GRADIENT, _LARGEST_WITH_DROPOUT = 192, 224
"""Between these sizes, and above the second with dropout, some flash kernels have no derivative."""
_WITHOUT_DERIVATIVE: Final = ((8, 6), (8, 7), (8, 8), (8, 9), (12, 0), (12, 1))
"""Compute capabilities of these flash kernels."""
_AMPERE: Final = (8, 0)
_PREFER_CUDNN: Final = (9, 10)
"""Major numbers of the compute capabilities on which torch tries cuDNN first."""
_CUDNN_HEADS: Final = {9: 256}
"""Largest size of a head for cuDNN's kernels, by the major number of the compute capability."""
_OTHER_CUDNN_HEADS: Final = 128
_CUDNN_HEADS_OF_BLACKWELL: Final = (192, 128)
"""Sizes of the keys' and the values' heads that cuDNN's kernels accept in addition."""
_CUDNN_DROPOUTS: Final = 16
"""Number of probabilities of dropout that cuDNN distinguishes."""
_ALIGNED: Final = 16
"""Bytes to whose multiple the addresses of the efficient kernel's arguments must be aligned."""
_DIMENSIONS: Final = 4
_DIMENSIONS_OF_MASK: Final = (2, 4)


class AttentionKernel(Enum):
    """Kernel of attention. ``MATH`` stands for several operations, which keep the scores."""

    CUDNN = auto()
    FLASH = auto()
    EFFICIENT = auto()
    MATH = auto()


class Attention(NamedTuple):
    """Arguments of ``scaled_dot_product_attention``. Only shapes, strides and types matter."""

    query: Tensor
    key: Tensor
    value: Tensor
    mask: Tensor | None = None
    dropout: float = 0.0
    is_causal: bool = False
    grouped: bool = False

    @property
    def tensors(self) -> tuple[Tensor, Tensor, Tensor]:
        return self.query, self.key, self.value

    @property
    def half(self) -> bool:
        return self.query.dtype in _HALF

    @property
    def trains(self) -> bool:
        return torch.is_grad_enabled() and any(tensor.requires_grad for tensor in self.tensors)


def chosen(gpu: Gpu, call: Attention) -> AttentionKernel:
    """Return the kernel that torch chooses for a call on ``gpu`` (``select_sdp_backend``)."""
    # The program may have disabled kernels, for example by `torch.nn.attention.sdpa_kernel`.
    enabled: Any = torch.backends.cuda
    # torch takes the first enabled kernel that fits.
    order: dict[AttentionKernel, tuple[bool, Callable[[Gpu, Attention], bool]]] = {
        AttentionKernel.FLASH: (enabled.flash_sdp_enabled(), _by_flash),
        AttentionKernel.EFFICIENT: (enabled.mem_efficient_sdp_enabled(), _by_efficient),
        AttentionKernel.MATH: (enabled.math_sdp_enabled(), lambda *_: True),
    }
    cudnn = {AttentionKernel.CUDNN: (enabled.cudnn_sdp_enabled(), _by_cudnn)}
    order = cudnn | order if gpu.capability[0] in _PREFER_CUDNN else order | cudnn
    return next(
        (kernel for kernel, (on, fits) in order.items() if on and fits(gpu, call)),
        AttentionKernel.MATH,
    )


def _by_cudnn(gpu: Gpu, call: Attention) -> bool:
    query, key, value = call.tensors
    return (
        gpu.capability >= _AMPERE
        and call.half
        and _is_dense(call, one_value=True)
        and _heads_match(call, same=False)
        and _has_cudnn_mask(call)
        and _has_cudnn_heads(gpu, query.shape[-1], value.shape[-1])
        and key.shape[-2] != 1
        and not (call.dropout and query.shape[-2] == 1)
        and call.dropout * _CUDNN_DROPOUTS % 1 == 0
    )


def _has_cudnn_heads(gpu: Gpu, size: int, value_size: int) -> bool:
    generation = gpu.capability[0]
    if generation == 10 and (size, value_size) == _CUDNN_HEADS_OF_BLACKWELL:  # noqa: PLR2004
        return True
    largest = _CUDNN_HEADS.get(generation, _OTHER_CUDNN_HEADS)
    return max(size, value_size) <= largest and size % 8 == value_size % 8 == 0


def _has_cudnn_mask(call: Attention) -> bool:
    """Return whether a mask is none that is learned, and has one or all samples, heads, and so on."""
    mask, (samples, heads, rows, _) = call.mask, call.query.shape
    if mask is None:
        return True
    shape = (samples, heads, rows, call.key.shape[-2])
    return (
        not mask.requires_grad
        and mask.ndim in _DIMENSIONS_OF_MASK
        and all(
            length in (1, full)
            for length, full in zip(mask.shape, shape[-mask.ndim :], strict=True)
        )
    )


def _by_flash(gpu: Gpu, call: Attention) -> bool:
    query, key, _ = call.tensors
    size = query.shape[-1]
    without_derivative = size > _LARGEST_WITH_GRADIENT and (
        size <= _LARGEST_WITH_DROPOUT or call.dropout > 0
    )
    return (
        gpu.capability >= _AMPERE
        and call.half
        and call.mask is None
        and _is_dense(call, one_value=True)
        and _heads_match(call)
        and len({tensor.shape[-1] for tensor in call.tensors}) == 1
        and size <= _LARGEST_HEAD
        and not (call.trains and gpu.capability in _WITHOUT_DERIVATIVE and without_derivative)
        and (not call.is_causal or query.shape[-2] == key.shape[-2])
    )


def _by_efficient(gpu: Gpu, call: Attention) -> bool:
    query, key, value = call.tensors
    new = gpu.capability >= _AMPERE
    alignment = 8 if call.half else 4 if new else 1
    types = (torch.float32, torch.float16, *((torch.bfloat16,) if new else ()))
    return (
        query.dtype in types
        and _is_dense(call)
        and not (call.grouped and query.shape[-3] != key.shape[-3])
        and _heads_match(call)
        and query.shape[-1] == key.shape[-1]
        and all(size > 0 and size % alignment == 0 for size in (query.shape[-1], value.shape[-1]))
        and not (new and any(map(_is_misaligned, call.tensors)))
    )


def _is_misaligned(tensor: Tensor) -> bool:
    """Return whether a tensor begins at an address that vector instructions can't load from."""
    offset = int(tensor.storage_offset()) * tensor.element_size()
    return tensor.numel() > 0 and offset % _ALIGNED != 0


def _is_dense(call: Attention, *, one_value: bool = False) -> bool:
    """Return whether all tensors have four dimensions, values, and rows without gaps.

    ``one_value``: True if the strides of heads of one value don't matter.
    """
    if any(tensor.ndim != _DIMENSIONS for tensor in call.tensors):
        return False
    rows = all(tensor.stride(-1) == 1 for tensor in call.tensors)
    rows = rows or (one_value and call.query.shape[-1] == 1)
    return (
        rows
        and (call.mask is None or call.mask.stride(-1) == 1)
        and call.query.shape[-2] > 0
        and call.key.shape[-2] > 0
    )


def _heads_match(call: Attention, *, same: bool = True) -> bool:
    """Return whether samples and heads match without broadcasting.

    ``same``: True if the keys must have as many heads as the values.
    """
    samples, heads = ({tensor.shape[at] for tensor in call.tensors} for at in (0, 1))
    if len(samples) > 1:
        return False
    if not call.grouped:
        return len(heads) == 1
    query, key, value = (tensor.shape[1] for tensor in call.tensors)
    return query % key == 0 and query % value == 0 and not (same and key != value)


_aten: Final = torch.ops.aten
_ALIGNED_HEAD: Final = 8
_ALIGNED_MASK: Final = 8
"""Number of values to whose multiple the strides of a mask must be aligned for the efficient kernel."""


def attention_on(gpu: Gpu) -> Callable[..., Tensor]:
    """Return a function with the arguments of ``scaled_dot_product_attention``, for a GPU."""

    def attention(
        query: Tensor,
        key: Tensor,
        value: Tensor,
        attn_mask: Tensor | None = None,
        dropout_p: float = 0.0,
        is_causal: bool = False,
        *,
        scale: float | None = None,
        enable_gqa: bool = False,
    ) -> Tensor:
        call = Attention(query, key, value, attn_mask, dropout_p, is_causal, enable_gqa)
        kernel = chosen(gpu, call)
        mask = _of_numbers(attn_mask, query.dtype)
        if kernel is AttentionKernel.MATH:
            out: Tensor = _aten._scaled_dot_product_attention_math(
                query,
                key,
                value,
                mask,
                dropout_p,
                is_causal,
                scale=scale,
                enable_gqa=enable_gqa,
            )[0]
            return out
        # torch derives the scale from the head's size before it pads the head.
        scale = query.shape[-1] ** -0.5 if scale is None else scale
        size = query.shape[-1]
        if kernel is AttentionKernel.FLASH:
            query, key, value = map(_padded_head, (query, key, value))
            out = _aten._scaled_dot_product_flash_attention(
                query, key, value, dropout_p, is_causal, scale=scale
            )[0]
            return out if out.shape[-1] == size else out[..., :size]
        if kernel is AttentionKernel.EFFICIENT:
            mask = _expanded(mask, query, key)
        keeps = call.trains
        fused = (
            _aten._scaled_dot_product_cudnn_attention
            if kernel is AttentionKernel.CUDNN
            else _aten._scaled_dot_product_efficient_attention
        )
        out = fused(query, key, value, mask, keeps, dropout_p, is_causal, scale=scale)[0]
        return out  # noqa: RET504 - torch's operations have no types

    return attention


def _of_numbers(mask: Tensor | None, dtype: torch.dtype) -> Tensor | None:
    """Return a mask with a number for each score (``convert_boolean_attn_mask``)."""
    if mask is None or mask.dtype is not torch.bool:
        return mask
    kept, hidden = (torch.full((), value, dtype=dtype) for value in (0.0, -torch.inf))
    return torch.where(mask, kept, hidden)


def _padded_head(tensor: Tensor) -> Tensor:
    more = -tensor.shape[-1] % _ALIGNED_HEAD
    return functional.pad(tensor, (0, more)) if more else tensor


def _expanded(mask: Tensor | None, query: Tensor, key: Tensor) -> Tensor | None:
    """Return a mask with all samples and heads, and with aligned rows (``preprocess_mask``)."""
    if mask is None:
        return None
    if any(stride % _ALIGNED_MASK for stride in mask.stride()[:-1]) or mask.stride(-1) != 1:
        length = mask.shape[-1]
        # torch adds 8 values also if the length is a multiple of 8 (``pad_bias``).
        mask = functional.pad(mask, (0, _ALIGNED_MASK - length % _ALIGNED_MASK))[..., :length]
    shape: Any = (*query.shape[:-1], key.shape[-2])
    return mask.expand(shape)

"""Attention on a CUDA device: the operations that surround the kernel that torch chooses.

The rules are those of ``attention.cpp`` in torch's ``aten/src/ATen/native/transformers`` (torch 2.13).
torch's CPU build has no kernels for these operations, but knows the shapes of their results.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Final

import torch
from torch import Tensor
from torch.nn import functional

from memlog.estimates.attention_kernels import Attention, AttentionKernel, chosen
from memlog.estimates.cuda_kernels.gpu import Gpu

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
        mask = functional.pad(mask, (0, _ALIGNED_MASK - length % _ALIGNED_MASK))[..., :length]
    shape: Any = (*query.shape[:-1], key.shape[-2])
    return mask.expand(shape)

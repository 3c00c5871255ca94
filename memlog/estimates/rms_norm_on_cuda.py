"""``rms_norm`` on a CUDA device, where one kernel computes it. On the CPU, torch computes it in parts."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Final

import torch
from torch import Tensor

_aten: Final = torch.ops.aten
_HALF: Final = (torch.float16, torch.bfloat16)


def rms_norm(
    values: Tensor,
    normalized_shape: Sequence[int],
    weight: Tensor | None = None,
    eps: float | None = None,
) -> Tensor:
    """Return what CUDA's kernel returns; of a weight with another type, what the parts of it return."""
    if (weight is not None and weight.dtype is not values.dtype) or values.is_complex():
        parts: Tensor = _aten.rms_norm.default.decompose(values, normalized_shape, weight, eps)
        return parts
    out: Tensor = _RmsNorm.apply(values, weight, list(normalized_shape))
    return out


class _RmsNorm(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, values: Tensor, weight: Tensor | None, shape: list[int]) -> Tensor:
        rows = values.shape[: values.ndim - len(shape)]
        dtype = torch.float32 if values.dtype in _HALF else values.dtype
        out = torch.empty_like(values, memory_format=torch.contiguous_format)
        scale = values.new_empty((*rows, *([1] * len(shape))), dtype=dtype)
        ctx.save_for_backward(values, weight, scale)
        ctx.shape = shape
        return out

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, Tensor | None, None]:
        values, weight, scale = ctx.saved_tensors
        needed = list(ctx.needs_input_grad[:2])
        found = _aten._fused_rms_norm_backward(gradient, values, ctx.shape, scale, weight, needed)
        return found[0], found[1], None

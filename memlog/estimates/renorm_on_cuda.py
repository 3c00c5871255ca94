"""``renorm`` on a CUDA device, whose derivative computes in float32. On the CPU, it computes in float64."""

from __future__ import annotations

from typing import Any, Final

import torch
from torch import Tensor

_aten: Final = torch.ops.aten
_HALF: Final = (torch.float16, torch.bfloat16)


def renorm(values: Tensor, p: float, dim: int, most: float) -> Tensor:
    """Return what ``torch.renorm`` returns."""
    out: Tensor = _Renorm.apply(values, p, dim, most)
    return out


class _Renorm(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, values: Tensor, p: float, dim: int, most: float) -> Tensor:
        ctx.save_for_backward(values)
        ctx.arguments = p, dim, most
        with torch._C._AutoDispatchBelowAutograd():  # not this function again
            out: Tensor = _aten.renorm.default(values, p, dim, most)
        return out

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        """Return the gradient with as many temporary tensors as ``renorm_backward``."""
        (values,) = ctx.saved_tensors
        p, dim, most = ctx.arguments
        dims = [each for each in range(values.ndim) if each != dim % values.ndim]
        dtype = torch.float32 if values.dtype in _HALF else values.dtype
        norm = torch.linalg.vector_norm(values, p, dims, keepdim=True, dtype=dtype)
        product = (values * gradient).sum(dims, keepdim=True, dtype=dtype)
        of_norm = (values / norm).masked_fill_(norm == 0, 0) * product
        del product
        inverse = (norm + 1e-7).reciprocal()
        subtracted = inverse * of_norm
        difference = gradient - subtracted
        scaled = most * inverse * difference
        del subtracted, difference
        return torch.where(norm > most, scaled.to(values.dtype), gradient), None, None, None

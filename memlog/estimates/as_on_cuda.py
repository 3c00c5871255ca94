"""Imitation of operations on a CUDA device, for fake tensors that lie on the CPU.

A build of torch without CUDA can't record a backward pass of tensors on a CUDA device, not even of fake ones.
So an estimate runs on the CPU. Some operations keep different tensors on the two devices. memlog makes these
operations behave as on a CUDA device:

* dropout keeps its mask, with one byte for each value (``aten::native_dropout``);
* attention keeps no matrix of scores, because a fused kernel runs, even with dropout and a mask;
* autocast computes normalisations, softmax and losses in float32
  (https://docs.pytorch.org/docs/stable/amp.html, "CUDA Ops that can autocast to float32");
* optimizers update all parameters at once (``foreach``), which takes a temporary copy of them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any
from unittest.mock import patch

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor
from torch.optim import optimizer as torch_optimizer

_AUTOCAST = "AutocastCPU"
_FOREACH_DEVICES = "_get_foreach_kernels_supported_devices"
_FLOAT32 = """
    layer_norm group_norm softmax.int log_softmax.int nll_loss nll_loss_nd nll_loss2d mse_loss l1_loss
    smooth_l1_loss huber_loss kl_div binary_cross_entropy_with_logits cosine_embedding_loss cosine_similarity
    soft_margin_loss margin_ranking_loss hinge_embedding_loss poisson_nll_loss triplet_margin_loss
    exp log log2 log10 log1p expm1 pow.Tensor_Scalar pow.Tensor_Tensor pow.Scalar reciprocal rsqrt softplus
    logsumexp cumsum cumprod prod sum sum.dim_IntList norm.Scalar norm.ScalarOpt_dim cdist renorm
"""


@contextmanager
def as_on_cuda() -> Iterator[None]:
    """Make operations of this process behave as on a CUDA device inside the block."""
    library = torch.library.Library("aten", "IMPL")
    types = [*torch_optimizer._foreach_supported_types, FakeTensor]
    onednn = torch._C._get_mkldnn_enabled()
    torch._C._set_mkldnn_enabled(False)  # oneDNN's LSTM keeps memory that no tensor shows
    try:
        library.impl("dropout", _dropout, "AutogradCPU")
        library.impl("scaled_dot_product_attention", _attention, "AutogradCPU")
        for name in _FLOAT32.split():
            if not torch._C._dispatch_has_kernel_for_dispatch_key(f"aten::{name}", _AUTOCAST):
                library.impl(name, _in_float32(name), _AUTOCAST)
        with (
            patch.object(torch.autocast, "__init__", _autocast_on_cpu(torch.autocast.__init__)),
            patch.object(torch_optimizer, "_foreach_supported_types", types),
            patch.object(torch_optimizer, _FOREACH_DEVICES, lambda: ["cpu"]),
        ):
            yield
    finally:
        torch._C._set_mkldnn_enabled(onednn)
        library._destroy()


def _dropout(tensor: Tensor, p: float, train: bool) -> Tensor:
    return torch.native_dropout(tensor, p, train)[0] if train and p else tensor


def _attention(
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
    """Compute attention as the fused kernels do, which keep one number for each row of scores."""
    del dropout_p  # the kernels keep the state of a random number generator, not a mask
    if enable_gqa:
        repeats = query.shape[-3] // key.shape[-3]
        key, value = (one.repeat_interleave(repeats, -3) for one in (key, value))
    if attn_mask is not None and attn_mask.dtype == torch.bool:
        kept, hidden = (torch.full((), value, dtype=query.dtype) for value in (0.0, -torch.inf))
        attn_mask = torch.where(attn_mask, kept, hidden)
    fused = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu
    learned = attn_mask if attn_mask is not None and attn_mask.requires_grad else None
    attn_mask = None if attn_mask is None else attn_mask.detach()
    out: Tensor = fused(query, key, value, 0.0, is_causal, attn_mask=attn_mask, scale=scale)[0]
    if learned is not None:
        scores = (*query.shape[:-1], key.shape[-2])
        out = _WithMaskGradient.apply(out, learned.expand(scores))
    return out


class _WithMaskGradient(torch.autograd.Function):
    """Autograd function for attention with a learned mask.

    The gradient of the mask has one value for each score.
    """

    @staticmethod
    def forward(ctx: Any, out: Tensor, mask: Tensor) -> Tensor:
        ctx.save_for_backward(mask)
        return out.view_as(out)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, Tensor]:
        (mask,) = ctx.saved_tensors
        return gradient, gradient.new_empty(mask.shape, dtype=mask.dtype)


def _in_float32(name: str) -> Callable[..., Any]:
    packet, _, overload = name.partition(".")
    operation = getattr(getattr(torch.ops.aten, packet), overload or "default")
    keys = torch._C.DispatchKeySet(torch._C.DispatchKey.AutocastCPU)

    def kernel(*args: Any, **kwargs: Any) -> Any:
        with torch._C._ExcludeDispatchKeyGuard(keys):
            return operation(*map(_widened, args), **kwargs)

    return kernel


def _widened(value: Any) -> Any:
    half = isinstance(value, Tensor) and value.dtype in (torch.float16, torch.bfloat16)
    return value.float() if half else value


def _autocast_on_cpu(init: Callable[..., None]) -> Callable[..., None]:
    def on_cpu(self: Any, device_type: str, dtype: Any = None, *args: Any, **kwargs: Any) -> None:
        if device_type == "cuda":
            device_type, dtype = "cpu", dtype or torch.float16
        init(self, device_type, dtype, *args, **kwargs)

    return on_cpu

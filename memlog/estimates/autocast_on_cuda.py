"""Types in which autocast computes operations on a CUDA device, for tensors on the CPU.

Autocast converts the arguments of other operations on the CPU than on a CUDA device. Sources: torch's
``aten/src/ATen/autocast_mode.h`` (torch 2.13), and
https://docs.pytorch.org/docs/stable/amp.html, "CUDA Ops that can autocast to float32".
"""

from __future__ import annotations

import functools
import warnings
from collections.abc import Callable, Sequence
from typing import Any, Final

import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves, tree_map_only

_ON_CPU: Final = "AutocastCPU"
_ON_CUDA: Final = "AutocastCUDA"
_HALF: Final = (torch.float16, torch.bfloat16)
_FLOAT32 = """
    layer_norm native_layer_norm group_norm rms_norm nll_loss nll_loss_nd nll_loss2d mse_loss l1_loss
    smooth_l1_loss huber_loss kl_div binary_cross_entropy_with_logits cosine_embedding_loss
    cosine_similarity soft_margin_loss margin_ranking_loss hinge_embedding_loss poisson_nll_loss
    triplet_margin_loss multilabel_margin_loss multi_margin_loss exp log log2 log10 log1p expm1
    pow.Tensor_Scalar pow.Tensor_Tensor pow.Scalar reciprocal rsqrt softplus acos asin cosh sinh tan erfinv
    logsumexp cdist pdist dist renorm frobenius_norm.dim nuclear_norm nuclear_norm.dim
    upsample_nearest1d upsample_nearest2d
    upsample_nearest3d _upsample_nearest_exact1d _upsample_nearest_exact2d _upsample_nearest_exact3d
    upsample_linear1d upsample_bilinear2d _upsample_bilinear2d_aa upsample_trilinear3d upsample_bicubic2d
    _upsample_bicubic2d_aa
"""
"""Operations whose arguments are converted to float32."""
_FLOAT32_RESULT = """
    softmax.int log_softmax.int cumsum cumprod prod prod.dim_int sum sum.dim_IntList norm.Scalar
    norm.ScalarOpt_dim linalg_vector_norm linalg_matrix_norm linalg_matrix_norm.str_ord
"""
"""Operations that return float32, unless the program names another type. Their kernels read half precision
without a converted copy, except for softmax."""
_HALF_PRECISION = """
    addmv addr mv chain_matmul linalg_multi_dot lstm_cell gru_cell rnn_tanh_cell rnn_relu_cell
"""
_WIDEST = (
    "addcdiv addcmul atan2 bilinear cross dot vdot grid_sampler index_put tensordot scatter_add"
)


def register(library: torch.library.Library) -> None:
    """Let autocast on the CPU convert arguments as on a CUDA device, until ``library`` is destroyed."""
    lists: dict[str, Callable[[str], Callable[..., Any]]] = {
        _FLOAT32: functools.partial(_converting, convert=_widened),
        _FLOAT32_RESULT: _float32_result,
        _HALF_PRECISION: functools.partial(_converting, convert=_narrowed),
        _WIDEST: functools.partial(_converting, convert=_as_the_widest),
    }
    kernels = {name: make for names, make in lists.items() for name in names.split()}
    with warnings.catch_warnings():
        # torch warns of the first kernel that it finds registered already.
        warnings.filterwarnings("ignore", "Warning only once for all operators")
        for name in _converted_on_cpu_only():
            library.impl(name, torch.library.fallthrough_kernel, _ON_CPU)
        for name, make in kernels.items():
            if _exists(name):
                library.impl(name, make(name), _ON_CPU)


@functools.cache
def _converted_on_cpu_only() -> Sequence[str]:
    has_kernel = torch._C._dispatch_has_kernel_for_dispatch_key
    names = (name for name in torch._C._dispatch_get_all_op_names() if name.startswith("aten::"))
    return [
        name.removeprefix("aten::")
        for name in names
        if has_kernel(name, _ON_CPU) and not has_kernel(name, _ON_CUDA)
    ]


@functools.cache
def _exists(name: str) -> bool:
    packet, _, overload = name.partition(".")
    return hasattr(getattr(torch.ops.aten, packet, None), overload or "default")


def _operation(name: str) -> Any:
    packet, _, overload = name.partition(".")
    return getattr(getattr(torch.ops.aten, packet), overload or "default")


def _converting(name: str, convert: Callable[[Any], Any]) -> Callable[..., Any]:
    operation = _operation(name)

    def kernel(*args: Any, **kwargs: Any) -> Any:
        with _without_autocast():
            return operation(*convert(args), **convert(kwargs))

    return kernel


def _float32_result(name: str) -> Callable[..., Any]:
    packet, _, overload = name.partition(".")
    is_norm = packet == "norm"
    if is_norm:
        name = "norm.ScalarOpt_dtype" if overload == "Scalar" else "norm.ScalarOpt_dim_dtype"
    operation = _operation(name)
    at = [argument.name for argument in operation._schema.arguments].index("dtype")

    def kernel(tensor: Tensor, *args: Any, **kwargs: Any) -> Any:
        if is_norm:
            args = (
                *args,
                *(2, (), False)[len(args) : at - 1],
            )  # defaults, which the other overload lacks
        given = kwargs.get("dtype") is not None or len(args) >= at
        if is_norm or (not given and tensor.dtype in _HALF):
            kwargs["dtype"] = torch.float32 if tensor.dtype in _HALF else tensor.dtype
        with _without_autocast():
            return operation(tensor, *args, **kwargs)

    return kernel


def _without_autocast() -> Any:
    keys = torch._C.DispatchKeySet(torch._C.DispatchKey.AutocastCPU)
    return torch._C._ExcludeDispatchKeyGuard(keys)


def _widened(values: Any) -> Any:
    return tree_map_only(Tensor, lambda one: one.float() if one.dtype in _HALF else one, values)


def _narrowed(values: Any) -> Any:
    dtype = torch.get_autocast_dtype("cpu")
    return tree_map_only(Tensor, lambda one: one.to(dtype) if _is_convertible(one) else one, values)


def _as_the_widest(values: Any) -> Any:
    types = {one.dtype for one in tree_leaves(values) if isinstance(one, Tensor)}
    wide = torch.float32 in types
    return _widened(values) if wide else values


def _is_convertible(tensor: Tensor) -> bool:
    return tensor.is_floating_point() and tensor.dtype is not torch.float64

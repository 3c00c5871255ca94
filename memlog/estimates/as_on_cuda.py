"""Imitation of operations on a CUDA device, for fake tensors that lie on the CPU.

The kernels are ``_thnn_fused_gru_cell`` and ``_thnn_fused_lstm_cell`` (torch 2.13). They keep the gates for
the backward pass, as torch's derivatives of them do.

torch makes fake results as its kernels for the CPU do, because fake tensors lie there. Sources, in torch's
``aten/src/ATen/native``: ``cuda/EmbeddingBag.cu``, ``cuda/layer_norm_kernel.cu``,
``cuda/Activation.cpp`` and ``transformers/cuda/attention.cu``.

A build of torch without CUDA can't record a backward pass of tensors on a CUDA device, not even of fake ones.
So an estimate runs on the CPU. Some operations keep different tensors on the two devices. memlog makes these
operations behave as on a CUDA device:

* dropout keeps its mask, with one byte for each value (``aten::native_dropout``);
* attention runs the fused kernel that torch chooses on the device, and keeps what this kernel keeps;
* autocast computes in the types of `memlog.estimates.as_on_cuda`;
* group normalisation keeps a contiguous copy of its input;
* batch normalisation by cuDNN keeps a contiguous copy of its input;
* convolutions return tensors in the layouts of cuDNN (`memlog.estimates.cuda_kernels.layers`);
* cuBLAS keeps its workspaces (`memlog.estimates.device_memory`);
* optimizers update all parameters at once (``foreach``), which takes a temporary copy of them.

Autocast converts the arguments of other operations on the CPU than on a CUDA device. Sources: torch's
``aten/src/ATen/autocast_mode.h`` (torch 2.13), and
https://docs.pytorch.org/docs/stable/amp.html, "CUDA Ops that can autocast to float32".
"""

from __future__ import annotations

import functools
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from math import prod
from typing import Any, Final, TypeAlias
from unittest.mock import patch

import torch
from torch import Tensor
from torch.optim import optimizer as torch_optimizer

from memlog.estimates.ctc_of_lists import ctc_loss
from memlog.estimates.cuda_kernels import layers
from memlog.estimates.cuda_kernels.attention import attention_on
from memlog.estimates.cuda_kernels.layers import by_cudnn, suggested
from memlog.estimates.cuda_kernels.reductions import Gpu
from memlog.estimates.cuda_workspaces import computed_from_shapes
from memlog.estimates.device_memory import Cublas
from memlog.estimates.places import Places
from memlog.torchside.fakes import (
    FakeTensor,
    below_autograd,
    foreach_for,
    operations,
    tree_leaves,
    tree_map_only,
    without_autocast_on_cpu,
)
from memlog.torchside.tensors import has_kernel, onednn_enabled, set_onednn_enabled
from memlog.tracer.engines import patches
from memlog.tracer.engines.simulated_step import SIMULATED

_KEPT_BY_GRU: Final = 5
"""Values that the GRU's kernel keeps for each value of the state."""


def gru_cell(
    values: Tensor,
    state: Tensor,
    weight: Tensor,
    state_weight: Tensor,
    bias: Tensor | None = None,
    state_bias: Tensor | None = None,
) -> Tensor:
    gates, state_gates = values @ weight.t(), state @ state_weight.t()
    out: Tensor = _Gru.apply(gates, state_gates, state, bias, state_bias)
    return out


def lstm_cell(
    values: Tensor,
    state: Sequence[Tensor],
    weight: Tensor,
    state_weight: Tensor,
    bias: Tensor | None = None,
    state_bias: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    gates, state_gates = values @ weight.t(), state[0] @ state_weight.t()
    out: tuple[Tensor, Tensor] = _Lstm.apply(gates, state_gates, state[1], bias, state_bias)
    return out


class _Gru(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, gates: Tensor, state_gates: Tensor, state: Tensor, *biases: Tensor | None
    ) -> Tensor:
        rows, width = state.shape
        kept = state.new_empty(rows, _KEPT_BY_GRU * width)
        ctx.save_for_backward(gates, state_gates, state, kept, *biases)
        return torch.empty_like(state)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        gates, state_gates, state, _kept, *biases = ctx.saved_tensors
        of_gates = torch.empty_like(gates), torch.empty_like(state_gates)
        of_state = torch.empty_like(state)
        of_biases = (
            None if bias is None else of_gate.sum(0)
            for of_gate, bias in zip(of_gates, biases, strict=True)
        )
        del gradient
        return (*of_gates, of_state, *of_biases)


class _Lstm(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, gates: Tensor, state_gates: Tensor, cell: Tensor, *biases: Tensor | None
    ) -> tuple[Tensor, Tensor]:
        kept = torch.empty_like(gates)
        out, new_cell = torch.empty_like(cell), torch.empty_like(cell)
        ctx.save_for_backward(gates, state_gates, cell, new_cell, kept, *biases)
        return out, new_cell

    @staticmethod
    def backward(ctx: Any, gradient: Tensor, of_new_cell: Tensor) -> tuple[Tensor | None, ...]:
        gates, _state_gates, cell, _new_cell, _kept, *biases = ctx.saved_tensors
        of_gates, of_cell = torch.empty_like(gates), torch.empty_like(cell)
        of_bias = None if biases[0] is None else of_gates.sum(0)
        del gradient, of_new_cell
        # The two products are added, as are the two biases, so both have the same gradient.
        return of_gates, of_gates, of_cell, of_bias, of_bias


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
        with below_autograd():  # not this function again
            out: Tensor = _aten.renorm.default(values, p, dim, most)
        return out

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        """Return the gradient with as many temporary tensors as ``renorm_backward``."""
        (values,) = ctx.saved_tensors
        p, dim, most = ctx.arguments
        dims = [axis for axis in range(values.ndim) if axis != dim % values.ndim]
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
        # The kernel accumulates 16-bit values in float32.
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
        gradients = _aten._fused_rms_norm_backward(
            gradient, values, ctx.shape, scale, weight, needed
        )
        return gradients[0], gradients[1], None


_MAXIMUM: Final = 2
"""Number of the mode of ``embedding_bag`` that returns the largest values."""

Correct: TypeAlias = Callable[[Any, Any], Any]
"""Function that gets an operation's arguments and its results on the CPU, and returns those on a device."""


def _of_bags(args: Any, out: Any) -> tuple[Tensor, ...]:
    """Return the results of a sum of embeddings, with the bag of each index."""
    indices, offsets = args[1:3]
    mode = args[4] if len(args) > 4 else 0  # noqa: PLR2004
    values: Tensor = out[0]
    largest = values.shape if mode == _MAXIMUM else (0,)
    of_indices = indices.new_empty
    return (
        values,
        of_indices(indices.shape),
        of_indices(offsets.shape),
        of_indices(largest),
    )


def _without_random_state(_: Any, out: Any) -> tuple[Tensor, ...]:
    """Return the results without the generator's seed and offset, which lie on the host."""
    values, sums, *state = out
    return (values, sums, *(tensor.new_empty(0) for tensor in state))


def _with_wide_statistics(args: Any, out: Any) -> tuple[Tensor, ...]:
    """Return the results of a layer norm, whose means and deviations have the type of accumulation."""
    dtype = torch.float32 if args[0].dtype in _HALF else args[0].dtype
    return (out[0], *(statistic.new_empty(statistic.shape, dtype=dtype) for statistic in out[1:]))


def _without_buffer(_: Any, out: Any) -> tuple[Tensor, Tensor]:
    values, buffer = out
    return values, buffer.new_empty(0)


def _by_rows(_: Any, out: Tensor) -> Tensor:
    return out.new_empty(out.shape)


def _of_batch_norm(args: Any, out: Any) -> tuple[Tensor, ...]:
    """Return the results of a batch norm. For 16 bits, its statistics are float32, also in evaluation."""
    values = args[0]
    if values.dtype not in _HALF:
        return tuple(out)
    channels = values.shape[1]
    return (out[0], *(values.new_empty(channels, dtype=torch.float32) for _ in out[1:]))


def _of_batch_norm_backward(args: Any, out: Any) -> tuple[Tensor | None, ...]:
    """Return the gradients. In evaluation, torch's own kernel returns that of the images by rows."""
    trains, gradient = args[7], out[0]
    if gradient is None:
        return tuple(out)
    layout = suggested(args[1]) if trains else torch.contiguous_format
    return (torch.empty_like(gradient, memory_format=layout), *out[1:])


def _first_by_rows(_: Any, out: Any) -> tuple[Tensor | None, ...]:
    first = out[0]
    return (None if first is None else first.new_empty(first.shape), *out[1:])


CORRECTIONS: Final[dict[Any, Correct]] = {
    _aten._embedding_bag.default: _of_bags,
    _aten._embedding_bag_forward_only.default: _of_bags,
    _aten.log_sigmoid_forward.default: _without_buffer,
    _aten._fused_rms_norm_backward.default: _first_by_rows,
    _aten.glu_backward.default: _by_rows,
    _aten._log_softmax_backward_data.default: _by_rows,
    _aten.native_batch_norm.default: _of_batch_norm,
    _aten.native_batch_norm_backward.default: _of_batch_norm_backward,
    _aten.pixel_shuffle.default: _by_rows,
    _aten.pixel_unshuffle.default: _by_rows,
    _aten.reflection_pad2d.default: _by_rows,
    _aten.replication_pad2d.default: _by_rows,
    _aten.native_layer_norm.default: _with_wide_statistics,
    _aten._scaled_dot_product_efficient_attention.default: _without_random_state,
}


_FOREACH_DEVICES = "_get_foreach_kernels_supported_devices"


@contextmanager
def as_on_cuda(gpu: Gpu, places: Places) -> Iterator[None]:
    """Make operations of this process behave as on a CUDA device inside the block.

    Traces leave out tensors that ``places`` finds on the host.
    """
    library = torch.library.Library("aten", "IMPL")
    onednn = onednn_enabled()
    set_onednn_enabled(False)  # oneDNN's LSTM keeps memory that no tensor shows
    try:
        # The functions replace the kernels of autograd, so that autograd records the operations inside.
        library.impl("batch_norm", _batch_norm, "AutogradCPU")
        library.impl("group_norm", _group_norm, "AutogradCPU")
        library.impl("ctc_loss.IntList", ctc_loss, "AutogradCPU")
        library.impl("dropout", _dropout, "AutogradCPU")
        library.impl("renorm", renorm, "AutogradCPU")
        library.impl("rms_norm", rms_norm, "AutogradCPU")
        library.impl("gru_cell", gru_cell, "AutogradCPU")
        library.impl("lstm_cell", lstm_cell, "AutogradCPU")
        library.impl("scaled_dot_product_attention", attention_on(gpu), "AutogradCPU")
        for name in ("softmax", "log_softmax"):
            library.impl(f"{name}.int", _softmax(name), "AutogradCPU")
        register_casts(library)
        with (
            patch.object(torch.autocast, "__init__", _autocast_on_cpu(torch.autocast.__init__)),
            foreach_for(FakeTensor),
            # The fake tensors lie on the CPU, and torch chooses `foreach` only for the devices in this list.
            patch.object(torch_optimizer, _FOREACH_DEVICES, lambda: ["cpu", "cuda"]),
            computed_from_shapes(gpu),
            layers.of_cudnn(),
            SIMULATED.knowing(placement=places, libraries=Cublas(gpu, places)),
            patches.RANDOM_STATE_COPIES.without_listeners(),  # they lie on the host
        ):
            yield
    finally:
        set_onednn_enabled(onednn)
        library._destroy()


def _dropout(tensor: Tensor, p: float, train: bool) -> Tensor:
    return torch.native_dropout(tensor, p, train)[0] if train and p else tensor


def _batch_norm(
    values: Tensor,
    weight: Tensor | None,
    bias: Tensor | None,
    mean: Tensor | None,
    variance: Tensor | None,
    training: bool,
    momentum: float,
    eps: float,
    _: bool,
) -> Tensor:
    """Return what ``_batch_norm_impl_index`` returns. cuDNN gets, and keeps, a contiguous copy."""
    if by_cudnn(values, weight, trains=training):
        values = values.contiguous(memory_format=layers.suggested(values))
    arguments = (values, weight, bias, mean, variance, training, momentum, eps)
    out: Tensor = torch.ops.aten.native_batch_norm(*arguments)[0]
    return out


def _group_norm(
    values: Tensor,
    groups: int,
    weight: Tensor | None = None,
    bias: Tensor | None = None,
    eps: float = 1e-5,
    _: bool = True,
) -> Tensor:
    shape = (values.shape[0], values.shape[1], prod(values.shape[2:]), groups)
    arguments = (values.contiguous(), weight, bias, *shape, eps)
    out: Tensor = torch.ops.aten.native_group_norm(*arguments)[0]
    return out


def _softmax(name: str) -> Callable[..., Tensor]:
    """Return ``softmax`` or ``log_softmax``. The kernel for float16 can return float32 without a copy."""
    operation = getattr(torch.ops.aten, f"_{name}").default

    def kernel(tensor: Tensor, dim: int, dtype: torch.dtype | None = None) -> Tensor:
        inside = tensor.dtype is torch.float16 and dtype is torch.float32
        if dtype is not None and not inside:
            tensor = tensor.to(dtype)
        result: Tensor = operation(tensor, dim, inside)
        return result

    return kernel


def _autocast_on_cpu(init: Callable[..., None]) -> Callable[..., None]:
    def on_cpu(self: Any, device_type: str, dtype: Any = None, *args: Any, **kwargs: Any) -> None:
        if device_type == "cuda":
            # CUDA's default type is float16, the CPU's is bfloat16.
            device_type, dtype = "cpu", dtype or torch.float16
        init(self, device_type, dtype, *args, **kwargs)

    return on_cpu


_ON_CPU: Final = "AutocastCPU"
_ON_CUDA: Final = "AutocastCUDA"
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


def register_casts(library: torch.library.Library) -> None:
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
        # On a CUDA device, autocast leaves these operations as they are.
        for name in _converted_on_cpu_only():
            library.impl(name, torch.library.fallthrough_kernel, _ON_CPU)
        for name, make in kernels.items():
            if _exists(name):
                library.impl(name, make(name), _ON_CPU)


@functools.cache
def _converted_on_cpu_only() -> Sequence[str]:
    return [
        name.removeprefix("aten::")
        for name in operations()
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
        # With autocast, torch would dispatch this call to this kernel again.
        with without_autocast_on_cpu():
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
        with without_autocast_on_cpu():
            return operation(tensor, *args, **kwargs)

    return kernel


def _widened(values: Any) -> Any:
    return tree_map_only(
        Tensor, lambda tensor: tensor.float() if tensor.dtype in _HALF else tensor, values
    )


def _narrowed(values: Any) -> Any:
    dtype = torch.get_autocast_dtype("cpu")
    return tree_map_only(
        Tensor, lambda tensor: tensor.to(dtype) if _is_convertible(tensor) else tensor, values
    )


def _as_the_widest(values: Any) -> Any:
    types = {tensor.dtype for tensor in tree_leaves(values) if isinstance(tensor, Tensor)}
    wide = torch.float32 in types
    return _widened(values) if wide else values


def _is_convertible(tensor: Tensor) -> bool:
    return tensor.is_floating_point() and tensor.dtype is not torch.float64

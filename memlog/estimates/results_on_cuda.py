"""Results of operations on a CUDA device that have other shapes or layouts than on the CPU.

torch makes fake results as its kernels for the CPU do, because fake tensors lie there. Sources, in torch's
``aten/src/ATen/native``: ``cuda/EmbeddingBag.cu``, ``cuda/layer_norm_kernel.cu``,
``cuda/Activation.cpp`` and ``transformers/cuda/attention.cu``.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Final, TypeAlias

import torch
from torch import Tensor

from memlog.estimates.convolution_layouts import suggested

_aten: Final = torch.ops.aten
_HALF: Final = (torch.float16, torch.bfloat16)
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
    return (values, sums, *(one.new_empty(0) for one in state))


def _with_wide_statistics(args: Any, out: Any) -> tuple[Tensor, ...]:
    """Return the results of a layer norm, whose means and deviations have the type of accumulation."""
    dtype = torch.float32 if args[0].dtype in _HALF else args[0].dtype
    return (out[0], *(one.new_empty(one.shape, dtype=dtype) for one in out[1:]))


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

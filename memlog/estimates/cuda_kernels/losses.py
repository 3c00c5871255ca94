"""Buffers of losses on CUDA.

Sources, in torch's ``aten/src/ATen/native``: ``Loss.cpp``, ``cuda/Loss.cu``, ``cuda/NLLLoss2d.cu``,
``cuda/MultiMarginLoss.cu`` and ``cuda/MultiLabelMarginCriterion.cu``.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Final

import torch

from memlog.estimates.cuda_kernels.call import (
    NONE,
    Blocks,
    Call,
    Temporaries,
    beside,
    bytes_of,
    copy_bytes,
)
from memlog.estimates.cuda_kernels.reductions import of_all
from memlog.tracer.engines.cpu.op_workspace import RESULTS

_NOT_REDUCED: Final = 0
"""Number of the reduction "none" of losses."""


def _sum(call: Call, numel: int, dtype: torch.dtype) -> Blocks:
    """Return the buffers of the sum or the mean of a loss's values."""
    return of_all(call.gpu, numel, dtype)


def _loss_with_values(call: Call) -> Blocks:
    """Return a loss for each value, beside the result, which has as many bytes."""
    if call["reduction"] == _NOT_REDUCED:
        return NONE
    numel, dtype = _values(call)
    size = numel * dtype.itemsize
    return (size, *_sum(call, numel, dtype), -size) if size else NONE


def _values(call: Call) -> tuple[int, torch.dtype]:
    values, target = call["self"], call["target"]
    shape = torch.broadcast_shapes(values.shape, target.shape)
    return shape.numel(), torch.result_type(values, target)


def _huber(call: Call) -> Blocks:
    if call["reduction"] == _NOT_REDUCED:
        return NONE
    numel, dtype = _values(call)
    size = numel * dtype.itemsize
    return (size, RESULTS, *_sum(call, numel, dtype), -size) if size else NONE


def _loss_in_place(call: Call) -> Blocks:
    """Return the reduced loss, which is copied into the result."""
    if call["reduction"] == _NOT_REDUCED:
        return NONE
    numel, dtype = _values(call)
    return (dtype.itemsize, *_sum(call, numel, dtype), -dtype.itemsize)


def _loss_with_logits(call: Call) -> Blocks:
    """Return the logarithms of sigmoids, and a loss for each value."""
    values, weight = call["self"], call["pos_weight"]
    numel, dtype = _values(call)
    size, logarithms = numel * dtype.itemsize, bytes_of(values)
    before: Blocks = (logarithms,)
    if weight is not None:
        before += (bytes_of(weight), size, -bytes_of(weight), -size)
    if call["reduction"] == _NOT_REDUCED:
        return (*before, RESULTS, -logarithms)
    return (*before, size, RESULTS, *_sum(call, numel, dtype), -size, -logarithms)


def _nll_2d(call: Call) -> Blocks:
    return beside(copy_bytes(call["self"]), copy_bytes(call["target"]))


def _copies(*names: str) -> Temporaries:
    """Return the function for an operation that copies some arguments, unless they are contiguous."""
    return lambda call: beside(*(copy_bytes(call[name]) for name in names))


def _margin(call: Call) -> Blocks:
    """Return a copy of the values, and the loss of each sample, which are then added."""
    values = call["self"]
    copied = copy_bytes(values)
    before = (copied,) if copied else ()
    return (RESULTS, *before, *_of_samples(call), *(-size for size in before))


def _label_margin(call: Call) -> Blocks:
    """Return the buffers of a loss that first allocates which classes are targets."""
    copies = [size for size in map(copy_bytes, (call["self"], call["target"])) if size]
    first = (*copies, RESULTS)
    return (*first, *_of_samples(call, RESULTS), *(-size for size in reversed(copies)))


def _of_samples(call: Call, *results: int) -> Blocks:
    values = call["self"]
    if call["reduction"] == _NOT_REDUCED or values.ndim < 2:  # noqa: PLR2004 - one sample
        return results
    samples = values.shape[0]
    size = samples * values.element_size()
    return (size, *results, *_sum(call, samples, values.dtype), -size)


TEMPORARIES: Final[dict[str, Temporaries]] = {
    "mse_loss": _loss_with_values,
    "smooth_l1_loss": _loss_with_values,
    "huber_loss": _huber,
    "binary_cross_entropy": _loss_in_place,
    "soft_margin_loss": _loss_in_place,
    "binary_cross_entropy_with_logits": _loss_with_logits,
    "nll_loss2d_forward": _nll_2d,
    "nll_loss_forward": _copies("self", "target", "weight"),
    "nll_loss_backward": _copies("self", "target", "weight"),
    "multi_margin_loss": _margin,
    "multi_margin_loss_backward": _copies("self", "target", "weight"),
    "multilabel_margin_loss_forward": _label_margin,
    "multilabel_margin_loss_backward": _copies("self", "target", "is_target"),
}
ORDERS: Final[dict[str, Callable[[Call], tuple[int, ...]]]] = {
    "nll_loss2d_forward": lambda _: (1, 0),
    "multilabel_margin_loss_forward": lambda _: (1, 0),
}
"""Functions that return `Workspace.order`."""

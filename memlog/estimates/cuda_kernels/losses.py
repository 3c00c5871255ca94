"""Buffers of losses on CUDA, and of operations that torch computes by several others.

Sources, in torch's ``aten/src/ATen/native``: ``Loss.cpp``, ``cuda/Loss.cu``, ``cuda/NLLLoss2d.cu``,
``cuda/MultiMarginLoss.cu`` and ``cuda/MultiLabelMarginCriterion.cu``.

Sources, in torch's ``aten/src/ATen/native``: ``ReduceOps.cpp``, ``Distance.cpp``,
``TensorTransformations.cpp``, ``TensorCompare.cpp``, ``Loss.cpp`` and ``cuda/LossCTC.cu``.

Sources, in torch's ``aten/src/ATen/native``: ``Distance.cpp`` and ``cuda/DistanceKernel.cu``.

Source: ``ForeachReduceOp.cu`` in torch's ``aten/src/ATen/native/cuda``.
"""

from __future__ import annotations

from collections.abc import Callable
from math import prod
from typing import Final

import torch
from torch import Tensor

from memlog.estimates.cuda_kernels.reductions import (
    NONE,
    Blocks,
    Call,
    Temporaries,
    around_results,
    beside,
    bytes_of,
    copy_bytes,
    dims_of,
    extremes,
    like,
    of_all,
    reduced,
    sums,
)
from memlog.tracer.engines.op_workspace import RESULTS

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


_COUNT: Final = torch.int64
_LENGTHS: Final = 3
"""Number of tensors of lengths and offsets, one for each sample, of the loss of a sequence."""


def _logsumexp(call: Call) -> Blocks:
    """Return the maxima, and the exponentials of the values' distances from them."""
    values = call.first
    if not values.numel():
        return NONE
    dims = dims_of(values, call["dim"])
    itemsize, dtype = call.out.element_size(), call.out.dtype
    maxima = call.out.numel() * itemsize
    exponentials = values.numel() * itemsize
    contiguous = like(values, dtype)
    return (
        maxima,
        *reduced(call.gpu, values, dims, extremes(dtype, dtype), itemsize),
        # torch replaces infinite maxima by 0. It takes their absolute values and compares them.
        *(maxima, call.out.numel(), -call.out.numel(), -maxima),
        *(exponentials, RESULTS),
        *reduced(call.gpu, contiguous, dims, sums(dtype, dtype), itemsize),
        *(-exponentials, -maxima),
    )


def _count_nonzero(call: Call) -> Blocks:
    """Return which values differ from 0, and these as numbers, which are added."""
    values = call.first
    if not values.numel():
        return NONE
    dims = dims_of(values, call["dim"])
    numbers = like(values, _COUNT)
    inner = reduced(call.gpu, numbers, dims, sums(_COUNT, _COUNT), _COUNT.itemsize)
    count, size = values.numel(), values.numel() * _COUNT.itemsize
    return (count, RESULTS, size, *inner, -size, -count)


def _dist(call: Call) -> Blocks:
    shape = torch.broadcast_shapes(call.first.shape, call["other"].shape)
    difference = torch.empty(shape, dtype=call.out.dtype, device="meta")
    kernel = sums(call.out.dtype, call.out.dtype)._replace(vector=4)
    inner = reduced(call.gpu, difference, range(len(shape)), kernel, call.out.element_size())
    return (bytes_of(difference), RESULTS, *inner, -bytes_of(difference))


def _roll(call: Call) -> Blocks:
    """Return a copy, and the tensor that is rolled in all but one dimension."""
    copied, size = copy_bytes(call.first), bytes_of(call.first)
    if len(call["dims"]) < 2:  # noqa: PLR2004
        return around_results(copied)
    before = (copied, size, -copied) if copied else (size,)
    return (*before, RESULTS, -size)


def _isinf(call: Call) -> Blocks:
    return around_results(bytes_of(call.first)) if call.first.is_floating_point() else NONE


def _ctc_loss(call: Call) -> Blocks:
    """Return the lengths and the offsets of samples. The losses are allocated after what is kept."""
    if call["targets"].ndim == 1 and call["targets"].dtype is torch.int32:
        raise NotImplementedError  # cuDNN computes it if the targets are on the CPU
    samples = call["targets"].shape[0] if call["targets"].ndim > 1 else len(call["input_lengths"])
    return around_results(*[samples * 8] * _LENGTHS)


def _ctc_loss_backward(call: Call) -> Blocks:
    samples = call["log_alpha"].shape[0]
    return around_results(*[samples * 8] * _LENGTHS, bytes_of(call["log_alpha"]))


def _soft_margin_backward(call: Call) -> Blocks:
    size = bytes_of(call.out)
    return (size, size, size, -size, -size, RESULTS, -size)


def _fft_to_real(call: Call) -> Blocks:
    """Return the copy of the input, which cuFFT overwrites."""
    return (RESULTS, bytes_of(call.first), -bytes_of(call.first))


def _reduced_by_index(call: Call) -> Blocks:
    if call["reduce"] == "mean" or not call["include_self"]:
        raise NotImplementedError
    return NONE


def _renorm(call: Call) -> Blocks:
    """Return the norm of each part, and what multiplies it."""
    values = call.first
    count, itemsize = values.shape[call["dim"]], values.element_size()
    # The norms of 16-bit values are float32. So the factors need a buffer of their own.
    return beside(*(count * 4, count * 2) if itemsize == 2 else (count * itemsize,))  # noqa: PLR2004


def _bernoulli(call: Call) -> Blocks:
    """Return probabilities of 16 bits as float32."""
    given = call["p"] if isinstance(call["p"], torch.Tensor) else call.first
    if (call["p"] is not None and given is call.first) or given.element_size() != 2:  # noqa: PLR2004
        return NONE
    return beside(given.numel() * 4)


def _windows_backward(call: Call) -> Blocks:
    """Return the indices of values of the dimension in which windows were made (``unfold``)."""
    return beside(call["input_sizes"][call["dim"]] * _COUNT.itemsize)


def _by_product(call: Call) -> Blocks:
    """Return the buffers of distances that are computed by a product of matrices."""
    left, right = call["x1"], call["x2"]
    itemsize = left.element_size()
    first, rows = left.numel() * itemsize, prod(left.shape[:-1]) * itemsize
    second, columns = right.numel() * itemsize, prod(right.shape[:-1]) * itemsize
    return (
        # ``_euclidean_dist`` appends to each vector its squared norm and a 1. One product then has all
        # squared distances.
        *(first, rows, *_norms(call, left), -first, rows),
        *(second, columns, *_norms(call, right), -second, columns),
        *(first, first + 2 * rows, -rows, -rows, -first),
        *(second + 2 * columns, -columns, -columns, RESULTS),
        *(-second - 2 * columns, -first - 2 * rows),
    )


def _norms(call: Call, vectors: Tensor) -> Blocks:
    dtype = vectors.dtype
    squares, kernel = like(vectors, dtype), sums(dtype, dtype)
    return reduced(call.gpu, squares, (-1,), kernel, dtype.itemsize)


def _forward(call: Call) -> Blocks:
    if all(call[name].is_contiguous() for name in ("x1", "x2")):
        return NONE
    raise NotImplementedError


def _backward(call: Call) -> Blocks:
    """Return copies of the vectors, and the gradient of each pair of vectors."""
    left = call["x1"]
    pairs = call["cdist"].numel() * left.shape[-1] * left.element_size()
    copies = [size for size in map(copy_bytes, (left, call["x2"])) if size]
    return (*copies, RESULTS, pairs, -pairs, *(-size for size in reversed(copies)))


def _backward_of_one(call: Call) -> Blocks:
    values = call["self"]
    rows, columns = values.shape
    # The kernel stores a gradient for each pair of vectors. torch then adds them.
    return beside((rows - 1) * rows * columns * values.element_size())


_CHUNK: Final = 65_536
"""Number of values of a tensor that one block of threads reduces."""
_HALF: Final = (torch.float16, torch.bfloat16)


def _norms_of_lists(call: Call) -> Blocks:
    tensors = call["self"]
    if not tensors:
        return NONE
    chunks = max(-(-tensor.numel() // _CHUNK) for tensor in tensors)
    dtype = tensors[0].dtype
    return around_results(len(tensors) * chunks * (4 if dtype in _HALF else dtype.itemsize))


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
    "renorm": _renorm,
    "bernoulli": _bernoulli,
    "unfold_backward": _windows_backward,
    "logsumexp": _logsumexp,
    "count_nonzero": _count_nonzero,
    "dist": _dist,
    "roll": _roll,
    "isinf": _isinf,
    "_ctc_loss": _ctc_loss,
    "_ctc_loss_backward": _ctc_loss_backward,
    "soft_margin_loss_backward": _soft_margin_backward,
    "scatter_reduce": _reduced_by_index,
    "index_reduce": _reduced_by_index,
    "_fft_c2r": _fft_to_real,
    "_euclidean_dist": _by_product,
    "_cdist_forward": _forward,
    "_cdist_backward": _backward,
    "_pdist_backward": _backward_of_one,
    **dict.fromkeys(("_foreach_norm", "_foreach_max", "_foreach_powsum"), _norms_of_lists),
}


ORDERS: Final[dict[str, Callable[[Call], tuple[int, ...]]]] = {
    "nll_loss2d_forward": lambda _: (1, 0),
    "multilabel_margin_loss_forward": lambda _: (1, 0),
    "_ctc_loss": lambda _: (1, 0),
}
"""Functions that return `Workspace.order`."""

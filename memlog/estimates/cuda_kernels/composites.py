"""Buffers of operations that torch computes on CUDA by several others.

Sources, in torch's ``aten/src/ATen/native``: ``ReduceOps.cpp``, ``Distance.cpp``,
``TensorTransformations.cpp``, ``TensorCompare.cpp``, ``Loss.cpp`` and ``cuda/LossCTC.cu``.
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
    around_results,
    beside,
    bytes_of,
    copy_bytes,
)
from memlog.estimates.cuda_kernels.reductions import (
    dims_of,
    extremes,
    like,
    reduced,
    sums,
)
from memlog.tracer.engines.cpu.op_workspace import RESULTS

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


TEMPORARIES: Final[dict[str, Temporaries]] = {
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
}
ORDERS: Final[dict[str, Callable[[Call], tuple[int, ...]]]] = {"_ctc_loss": lambda _: (1, 0)}
"""Functions that return `Workspace.order`."""

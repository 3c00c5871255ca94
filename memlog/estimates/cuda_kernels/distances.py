"""Buffers of distances between vectors on CUDA.

Sources, in torch's ``aten/src/ATen/native``: ``Distance.cpp`` and ``cuda/DistanceKernel.cu``.
"""

from __future__ import annotations

from math import prod
from typing import Final

from torch import Tensor

from memlog.estimates.cuda_kernels.call import (
    NONE,
    Blocks,
    Call,
    Temporaries,
    beside,
    copy_bytes,
)
from memlog.estimates.cuda_kernels.reductions import like, reduced, sums
from memlog.tracer.engines.cpu.op_workspace import RESULTS


def _by_product(call: Call) -> Blocks:
    """Return the buffers of distances that are computed by a product of matrices."""
    one, other = call["x1"], call["x2"]
    itemsize = one.element_size()
    first, rows = one.numel() * itemsize, prod(one.shape[:-1]) * itemsize
    second, columns = other.numel() * itemsize, prod(other.shape[:-1]) * itemsize
    return (
        *(first, rows, *_norms(call, one), -first, rows),
        *(second, columns, *_norms(call, other), -second, columns),
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
    one = call["x1"]
    pairs = call["cdist"].numel() * one.shape[-1] * one.element_size()
    copies = [size for size in map(copy_bytes, (one, call["x2"])) if size]
    return (*copies, RESULTS, pairs, -pairs, *(-size for size in reversed(copies)))


def _backward_of_one(call: Call) -> Blocks:
    values = call["self"]
    rows, columns = values.shape
    return beside((rows - 1) * rows * columns * values.element_size())


TEMPORARIES: Final[dict[str, Temporaries]] = {
    "_euclidean_dist": _by_product,
    "_cdist_forward": _forward,
    "_cdist_backward": _backward,
    "_pdist_backward": _backward_of_one,
}

"""Buffers of sorts and scans on CUDA.

Sources, in torch's ``aten/src/ATen/native/cuda``: ``Sort.cpp``, ``Sort.cu``, ``ScanKernels.cpp`` and
``IndexKernel.cpp``.
"""

from __future__ import annotations

from math import ceil, log, log2
from typing import Final

import torch
from torch import Tensor

from memlog.estimates.cuda_kernels import cub
from memlog.estimates.cuda_kernels.call import (
    NONE,
    Blocks,
    Call,
    Temporaries,
    around_results,
    beside,
    copy_bytes,
)

_SHORT: Final = 4096
"""Most values of a row that one block of threads sorts."""
_INDEX: Final = 8
_INT_BITS: Final = 31


def _sort(call: Call) -> Blocks:
    tensor = call.first
    if tensor.ndim == 0 or not tensor.numel():
        return NONE
    dim = call["dim"] % tensor.ndim
    length = tensor.shape[dim]
    rows = tensor.numel() // length
    if length <= _SHORT:
        return beside(_ranges(tensor, dim))
    if rows > 1:
        raise NotImplementedError
    return beside(length * _INDEX, cub.radix_sort(call.gpu, length, tensor.element_size()))


def _ranges(tensor: Tensor, dim: int) -> int:
    """Return the bytes of an index for each value of a row, as `arange` makes it before a short sort."""
    return tensor.shape[dim] * _INDEX


def _scan(call: Call) -> Blocks:
    """Return the buffers of a running sum or product."""
    tensor, out = call.first, call.out
    if not tensor.numel():
        return NONE
    itemsize = out.element_size()
    cast = tensor.numel() * itemsize if tensor.dtype is not out.dtype else 0
    one_row = tensor.numel() == (tensor.shape[call["dim"]] if tensor.ndim else 1)
    copied = 0 if one_row or tensor.is_contiguous() else tensor.numel() * itemsize
    return beside(
        cast, copied, cub.scan(tensor.numel(), itemsize) if one_row and tensor.ndim else 0
    )


def _masked_scatter(call: Call) -> Blocks:
    shape = torch.broadcast_shapes(call.first.shape, call["mask"].shape)
    count = shape.numel()
    expanded = count if call["mask"].shape != shape else 0
    if not count:
        return NONE
    scan = cub.scan(count, _INDEX)
    return (
        *(size for size in (count * _INDEX, expanded) if size),
        *(scan, -scan),
        *(-size for size in (expanded, count * _INDEX) if size),
    )


def _copied_after(call: Call) -> Blocks:
    return beside(copy_bytes(call.first))


_MANY_BLOCKS: Final = (
    *((20, 20_000), (40, 10_000), (80, 8000), (199, 5000), (799, 3000), (4000, 800)),
    (2**32 - 1, 400),
)
"""Most rows, and fewest values of a row, for which several blocks of threads search one row."""
_THREADS, _REGISTERS, _REGISTERS_OF_THREAD = 256, 65_536, 40
_FEWEST_VALUES, _MOST_VALUES = 4, 64
"""Numbers of values of a thread."""
_DIGITS: Final = 256


def _largest(call: Call) -> Blocks:
    """Return a copy, and what several blocks of threads need to search one row (``mbtopk``)."""
    tensor = call.first
    length = tensor.shape[call["dim"]] if tensor.ndim else 1
    if not tensor.numel() or length < next(
        fewest for most, fewest in _MANY_BLOCKS if tensor.numel() // length <= most
    ):
        return _copied_after(call)
    rows = tensor.numel() // length
    resident = _REGISTERS // (_REGISTERS_OF_THREAD * _THREADS) * call.gpu.processors * _THREADS
    values = min(max(-(-tensor.numel() // resident), _FEWEST_VALUES), _MOST_VALUES)
    blocks = rows * -(-length // (values * _THREADS))
    scan = cub.scan(blocks, 8)
    first = [size for size in (copy_bytes(tensor),) if size]
    first += [rows * tensor.element_size(), rows * 8, rows * 8]
    first += [blocks * _DIGITS * 2, rows * _DIGITS * 4, blocks * 4, blocks * 4]
    return (*first, *2 * (scan, -scan), *(-size for size in reversed(first)))


def _searched(call: Call) -> Blocks:
    return beside(*(copy_bytes(each) for each in call.args.values() if isinstance(each, Tensor)))


def _permutation(call: Call) -> Blocks:
    """Return the seed's place, the numbers, and random keys by which they are sorted."""
    count = call["n"]
    if not count:
        return NONE
    # Bits of keys for which at most one permutation in ten has a key twice (``randperm_out_cuda``).
    bits = min(64, ceil(log2(count - (6.0 * count * count + 1) / (12 * log(0.9)))))
    key = 4 if bits <= _INT_BITS else 8
    sizes = (count * _INDEX, count * key, count * key)
    return (
        *(_INDEX, -_INDEX),
        *beside(*sizes, cub.radix_sort(call.gpu, count, key, bits)),
    )


TEMPORARIES: Final[dict[str, Temporaries]] = {
    "sort": _sort,
    "topk": _largest,
    "kthvalue": lambda call: around_results(copy_bytes(call.first)),
    "cummax": _copied_after,
    "cummin": _copied_after,
    "bucketize": _searched,
    "searchsorted": _searched,
    "histc": lambda call: beside(*2 * (call.first.element_size(),), copy_bytes(call.first)),
    "randperm": _permutation,
    "cumsum": _scan,
    "cumprod": _scan,
    "logcumsumexp": _scan,
    "masked_scatter": _masked_scatter,
}

"""Buffers of sorts and scans on CUDA, of embeddings' derivatives and of indexing, which sort, too.

CUB divides the values into tiles, and stores a state for each tile. The sizes of tiles depend on the sizes of
values and on the compute capability. They are CUB's tuning policies (``cub/device/dispatch/tuning`` in
https://github.com/NVIDIA/cccl), as CUDA 13 compiles them into torch 2.13.

Sources, in torch's ``aten/src/ATen/native/cuda``: ``Sort.cpp``, ``Sort.cu``, ``ScanKernels.cpp`` and
``IndexKernel.cpp``.

Sources, in torch's ``aten/src/ATen/native/cuda``: ``Embedding.cu``, ``EmbeddingBackwardKernel.cu`` and
``Indexing.cu``.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from math import ceil, log, log2
from typing import Final

import torch
from torch import Tensor

from memlog.estimates.cuda_kernels.reductions import (
    NONE,
    Blocks,
    Call,
    Gpu,
    Temporaries,
    around_results,
    beside,
    copy_bytes,
)
from memlog.torchside import internals
from memlog.tracer.engines.op_workspace import RESULTS

_ALIGNMENT: Final = 256
"""Bytes to whose multiple CUB rounds each array in its storage (``AliasTemporaries``)."""
_DIGITS, _BITS_OF_DIGIT, _COUNTER = 256, 8, 8
_STATES_BEFORE: Final = 32
"""Number of states before the first tile's (``TILE_STATUS_PADDING``)."""

_SORT_TILES: Final = {
    9: {2: 5632, 4: 5376, 8: 4608},
    8: {4: 3072, 8: 3840},
    7: {4: 2816, 8: 2816},
}
"""Values of a tile of a radix sort: by compute capability, and by bytes of a key. The sorted values have 8
bytes."""
_FEWEST: Final = 2304
"""Most pairs that one block of threads sorts without storage, if a key or a value has 8 bytes."""
_PASSES_OF_HALF: Final = {8: 41379, 7: 41000}
"""Bytes for each multiprocessor of a sort whose keys have 2 bytes, before compute capability 9.0."""
_SCAN_TILES: Final = {2: (3840, 8, 2), 4: (1920, 8, 1), 8: (896, 16, 1)}
"""Values of a tile of a sum, bytes of its state, and other arrays, by bytes of a value."""
_UNIQUE_TILES: Final = {9: 4992, 8: 1344, 7: 320}
_UNIQUE_STATE: Final = 16


def radix_sort(gpu: Gpu, count: int, key: int, bits: int | None = None, value: int = 8) -> int:
    """Return the bytes with which CUB sorts ``count`` pairs by ``bits`` of keys of ``key`` bytes."""
    if count <= _FEWEST:
        return 1
    generation = _generation(gpu)
    copies = _aligned(count * key) + _aligned(count * value)
    tile = _SORT_TILES[generation].get(max(2, key))
    passes = -(-(bits or key * 8) // _BITS_OF_DIGIT)
    # A single pass goes straight from the input to the output.
    if passes == 1:
        copies = 0
    if tile is None:
        return copies + gpu.processors * _PASSES_OF_HALF[generation]
    tiles = -(-count // tile)
    arrays = (passes * _DIGITS * _COUNTER, tiles * _DIGITS * 4, passes * 4)
    return _ALIGNMENT - 1 + copies + sum(map(_aligned, arrays))


def scan_storage(count: int, itemsize: int) -> int:
    """Return the bytes with which CUB computes the running sums of ``count`` values."""
    tile, state, others = _SCAN_TILES.get(itemsize, _SCAN_TILES[4])
    return _states(count, tile, state) + others * _ALIGNMENT


def unique_storage(gpu: Gpu, count: int) -> int:
    """Return the bytes with which CUB finds the different ones of ``count`` sorted keys."""
    return _states(count, _UNIQUE_TILES[_generation(gpu)], _UNIQUE_STATE) + _ALIGNMENT


def _states(count: int, tile: int, state: int) -> int:
    return _ALIGNMENT - 1 + _aligned((-(-count // tile) + _STATES_BEFORE) * state)


def _generation(gpu: Gpu) -> int:
    return min(9, max(7, gpu.capability[0]))


def _aligned(size: int) -> int:
    return -(-size // _ALIGNMENT) * _ALIGNMENT


def bits_for(count: int) -> int:
    """Return how many bits distinguish ``count`` keys (``get_num_bits``)."""
    return max(1, count.bit_length())


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
    return beside(length * _INDEX, radix_sort(call.gpu, length, tensor.element_size()))


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
    # CUB scans a single row. torch's own kernel scans several rows, and needs them contiguous.
    one_row = tensor.numel() == (tensor.shape[call["dim"]] if tensor.ndim else 1)
    copied = 0 if one_row or tensor.is_contiguous() else tensor.numel() * itemsize
    return beside(
        cast, copied, scan_storage(tensor.numel(), itemsize) if one_row and tensor.ndim else 0
    )


def _masked_scatter(call: Call) -> Blocks:
    shape = torch.broadcast_shapes(call.first.shape, call["mask"].shape)
    count = shape.numel()
    expanded = count if call["mask"].shape != shape else 0
    if not count:
        return NONE
    scan = scan_storage(count, _INDEX)
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


def _largest(call: Call) -> Blocks:
    """Return a copy, and what several blocks of threads need to search one row (``mbtopk``)."""
    tensor = call.first
    length = tensor.shape[call["dim"]] if tensor.ndim else 1
    if not tensor.numel() or length < next(
        fewest for most, fewest in _MANY_BLOCKS if tensor.numel() // length <= most
    ):
        return _copied_after(call)
    rows = tensor.numel() // length
    # Threads that the device can run at once: the kernel's registers limit their number.
    resident = _REGISTERS // (_REGISTERS_OF_THREAD * _THREADS) * call.gpu.processors * _THREADS
    values = min(max(-(-tensor.numel() // resident), _FEWEST_VALUES), _MOST_VALUES)
    blocks = rows * -(-length // (values * _THREADS))
    scan = scan_storage(blocks, 8)
    first = [size for size in (copy_bytes(tensor),) if size]
    first += [rows * tensor.element_size(), rows * 8, rows * 8]
    first += [blocks * _DIGITS * 2, rows * _DIGITS * 4, blocks * 4, blocks * 4]
    return (*first, *2 * (scan, -scan), *(-size for size in reversed(first)))


def _searched(call: Call) -> Blocks:
    return beside(
        *(copy_bytes(argument) for argument in call.args.values() if isinstance(argument, Tensor))
    )


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
        *beside(*sizes, radix_sort(call.gpu, count, key, bits)),
    )


_FEW_INDICES: Final = 3072
"""Most indices whose gradients one kernel adds without sorting the indices."""
_ROWS_OF_THREAD: Final = 10
_WARP, _MOST_THREADS = 32, 1024
_BLOCKS_OF_ATOMICS: Final = 4
"""Blocks of threads for each multiprocessor. If fewer would add the segments, atomic additions are used."""
_MAXIMUM: Final = 2
"""Number of the mode of ``embedding_bag`` that returns the largest values."""
_CHECKED: Final = (8, 8, 1, -1, 1, -1, -8, -8)
"""Smallest and largest index, and whether they are within the tensor."""
_MASKS: Final = (torch.bool, torch.uint8)
_COUNT: Final = 8  # bytes of a number of segments


def _embedding_backward(call: Call) -> Blocks:
    gradient, indices = call["grad_output"], call["indices"]
    copied = copy_bytes(gradient)
    if indices.numel() <= _FEW_INDICES and not call["scale_grad_by_freq"]:
        return around_results(copied, copy_bytes(indices))
    count, index = indices.numel(), indices.element_size()
    per_index = count * index
    sort = radix_sort(call.gpu, count, index, bits_for(call["num_weights"]), index)
    added = _segments(call.gpu, gradient, count, index, call["num_weights"])
    counted = _counted(count, index) if call["scale_grad_by_freq"] else NONE
    first = (copied,) if copied else ()
    return (
        *first,
        *(per_index, per_index, per_index, sort, -sort, -per_index),
        *counted,
        RESULTS,
        *added,
        *((-per_index,) if counted else ()),
        *(-per_index, -per_index),
        *(-size for size in first),
    )


def _bag_backward(call: Call) -> Blocks:
    """Return the buffers of the derivative of ``embedding_bag``."""
    gradient, indices = call["grad"], call["indices"]
    if call["sparse"]:
        raise NotImplementedError
    if call["mode"] == _MAXIMUM:
        return NONE
    count, index, rows = indices.numel(), indices.element_size(), call["num_weights"]
    per_index = count * index
    sort = radix_sort(call.gpu, count, index, bits_for(rows), index)
    added = _segments(call.gpu, gradient, count, index, rows, in_bags=True)
    counted = _counted(count, index) if call["scale_grad_by_freq"] else NONE
    return (
        *(per_index, per_index, per_index, sort, -sort, -per_index),
        *counted,
        RESULTS,
        *added,
        *((-per_index,) if counted else ()),
        *(-per_index, -per_index),
    )


def _counted(count: int, index: int) -> Blocks:
    """Return the number of occurrences of each index, and the buffers of the two scans that find it."""
    return (count * index, *2 * (_scan_of_counts(count), -_scan_of_counts(count)))


def _scan_of_counts(count: int) -> int:
    return scan_storage(count, 8)


def _segments(
    gpu: Gpu, gradient: Tensor, count: int, index: int, rows: int, *, in_bags: bool = False
) -> Blocks:
    """Return the buffers in which rows of gradients with the same index are added."""
    width = gradient.shape[-1]
    segments = min(count, rows)
    parts = count // _ROWS_OF_THREAD + segments
    offsets, per_segment = count * index, segments * index
    unique, scan = unique_storage(gpu, count), scan_storage(segments, 8)
    accumulated = 4 if gradient.element_size() == 2 else gradient.element_size()  # noqa: PLR2004
    threads = -(-width // _WARP) * _WARP
    blocks = -(-segments * threads // min(threads, _MOST_THREADS))
    if not in_bags and blocks < gpu.processors * _BLOCKS_OF_ATOMICS and parts > blocks * 4:
        widened = rows * width * accumulated if gradient.element_size() == 2 else 0  # noqa: PLR2004
        inner = [size for size in (parts * index, widened) if size]
    else:
        inner = [parts * width * accumulated]
    return (
        *(offsets, _COUNT, offsets, unique, -unique, -offsets),
        *(per_segment, per_segment, scan, -scan),
        *(_COUNT, parts * index),
        *inner,
        *(-size for size in reversed(inner)),
        *(-parts * index, -_COUNT, -per_segment, -per_segment, -_COUNT, -offsets),
    )


def _index(call: Call) -> Blocks:
    return around_results(*_as_long(call["indices"]))


def _as_long(indices: Iterable[Tensor | None]) -> list[int]:
    """Return the bytes of copies of indices of other types than int64."""
    given = [index for index in indices if index is not None and index.dtype is not torch.int64]
    return [index.numel() * _INDEX for index in given if index.dtype not in _MASKS]


def _index_put(call: Call) -> Blocks:
    """Return the buffers in which values are added in the order of sorted indices."""
    tensor, indices, values = call.first, call["indices"], call["values"]
    casts = _as_long(indices)
    if not call["accumulate"]:
        return beside(*casts)
    given = [index for index in indices if index is not None]
    if any(index.dtype in _MASKS for index in given):
        raise NotImplementedError
    count = torch.broadcast_shapes(*(index.shape for index in given)).numel()
    rows = 1
    for at, index in enumerate(indices):
        rows *= tensor.shape[at] if index is not None else 1
    size = count * _INDEX
    sort = radix_sort(call.gpu, count, _INDEX, bits_for(rows), _INDEX)
    expanded = count * (tensor.numel() // max(1, rows))
    widened = 0 if values.numel() == expanded and values.is_contiguous() else expanded
    copy = widened * values.element_size()
    made = () if str(call.func._schema.name).endswith("_") else (RESULTS,)
    # Autograd's own call checks no index (``_index_put_impl_`` with ``unsafe``).
    checked = () if internals.backward_task() != internals.NO_TASK else _CHECKED
    more = len(given) - 1
    return (
        *made,
        *casts,
        *(*checked, size, size, -size),
        *more * (*checked, size, size, -size, -size),
        *(-cast for cast in casts),
        *((copy,) if copy else ()),
        *(size, size, size, sort, -sort, -size),
        *(-size, -size, *((-copy,) if copy else ()), -size),
    )


_BAGS: Final = ("_embedding_bag", "_embedding_bag_forward_only")
ORDERS: Final[dict[str, Callable[[Call], tuple[int, ...]]]] = dict.fromkeys(
    _BAGS, lambda _: (2, 1, 0, 3)
)
"""Functions that return `Workspace.order`. ``embedding_bag`` allocates its sums after the bags of indices."""


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
    **dict.fromkeys(_BAGS, lambda _: NONE),
    "embedding_dense_backward": _embedding_backward,
    "_embedding_bag_backward": _bag_backward,
    "_embedding_bag_dense_backward": _bag_backward,
    "index": _index,
    "_unsafe_index": _index,
    "index_put": _index_put,
    "_index_put_impl": _index_put,
    "_unsafe_index_put": _index_put,
}

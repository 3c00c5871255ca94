"""Buffers of derivatives of embeddings and of indexing on CUDA.

Sources, in torch's ``aten/src/ATen/native/cuda``: ``Embedding.cu``, ``EmbeddingBackwardKernel.cu`` and
``Indexing.cu``.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Final

import torch
from torch import Tensor

from memlog.estimates.cuda_kernels import cub
from memlog.estimates.cuda_kernels.call import (
    NONE,
    Blocks,
    Call,
    Gpu,
    Temporaries,
    around_results,
    beside,
    copy_bytes,
)
from memlog.tracer import torch_private
from memlog.tracer.engines.cpu.op_workspace import RESULTS

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
_INDEX: Final = 8
_MASKS: Final = (torch.bool, torch.uint8)
_COUNT: Final = 8  # bytes of a number of segments


def _embedding_backward(call: Call) -> Blocks:
    gradient, indices = call["grad_output"], call["indices"]
    copied = copy_bytes(gradient)
    if indices.numel() <= _FEW_INDICES and not call["scale_grad_by_freq"]:
        return around_results(copied, copy_bytes(indices))
    count, index = indices.numel(), indices.element_size()
    each = count * index
    sort = cub.radix_sort(call.gpu, count, index, cub.bits_for(call["num_weights"]), index)
    added = _segments(call.gpu, gradient, count, index, call["num_weights"])
    counted = _counted(count, index) if call["scale_grad_by_freq"] else NONE
    first = (copied,) if copied else ()
    return (
        *first,
        *(each, each, each, sort, -sort, -each),
        *counted,
        RESULTS,
        *added,
        *((-each,) if counted else ()),
        *(-each, -each),
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
    each = count * index
    sort = cub.radix_sort(call.gpu, count, index, cub.bits_for(rows), index)
    added = _segments(call.gpu, gradient, count, index, rows, in_bags=True)
    counted = _counted(count, index) if call["scale_grad_by_freq"] else NONE
    return (
        *(each, each, each, sort, -sort, -each),
        *counted,
        RESULTS,
        *added,
        *((-each,) if counted else ()),
        *(-each, -each),
    )


def _counted(count: int, index: int) -> Blocks:
    """Return the number of occurrences of each index, and the buffers of the two scans that find it."""
    return (count * index, *2 * (_scan_of_counts(count), -_scan_of_counts(count)))


def _scan_of_counts(count: int) -> int:
    return cub.scan(count, 8)


def _segments(
    gpu: Gpu, gradient: Tensor, count: int, index: int, rows: int, *, in_bags: bool = False
) -> Blocks:
    """Return the buffers in which rows of gradients with the same index are added."""
    width = gradient.shape[-1]
    segments = min(count, rows)
    parts = count // _ROWS_OF_THREAD + segments
    offsets, per_segment = count * index, segments * index
    unique, scan = cub.unique(gpu, count), cub.scan(segments, 8)
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
    given = [each for each in indices if each is not None and each.dtype is not torch.int64]
    return [each.numel() * _INDEX for each in given if each.dtype not in _MASKS]


def _index_put(call: Call) -> Blocks:
    """Return the buffers in which values are added in the order of sorted indices."""
    tensor, indices, values = call.first, call["indices"], call["values"]
    casts = _as_long(indices)
    if not call["accumulate"]:
        return beside(*casts)
    given = [each for each in indices if each is not None]
    if any(each.dtype in _MASKS for each in given):
        raise NotImplementedError
    count = torch.broadcast_shapes(*(each.shape for each in given)).numel()
    rows = 1
    for at, each in enumerate(indices):
        rows *= tensor.shape[at] if each is not None else 1
    size = count * _INDEX
    sort = cub.radix_sort(call.gpu, count, _INDEX, cub.bits_for(rows), _INDEX)
    expanded = count * (tensor.numel() // max(1, rows))
    widened = 0 if values.numel() == expanded and values.is_contiguous() else expanded
    copy = widened * values.element_size()
    made = () if str(call.func._schema.name).endswith("_") else (RESULTS,)
    # Autograd's own call checks no index (``_index_put_impl_`` with ``unsafe``).
    checked = () if torch_private.backward_task() != torch_private.NO_TASK else _CHECKED
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
TEMPORARIES: Final[dict[str, Temporaries]] = {
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
ORDERS: Final[dict[str, Callable[[Call], tuple[int, ...]]]] = dict.fromkeys(
    _BAGS, lambda _: (2, 1, 0, 3)
)
"""Functions that return `Workspace.order`. ``embedding_bag`` allocates its sums after the bags of indices."""

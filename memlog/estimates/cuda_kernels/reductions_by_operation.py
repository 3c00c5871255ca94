"""Buffers of torch's reductions on CUDA, by operation.

Sources: ``ReduceSumProdKernel.cu``, ``ReduceMomentKernel.cu``, ``ReduceNormKernel.cu``,
``ReduceMinValuesKernel.cu``, ``ReduceArgMaxKernel.cu``, ``ReduceLogicKernel.cu`` and
``ReduceAMinMaxKernel.cu`` in torch's ``aten/src/ATen/native/cuda``, and ``ReduceOpsUtils.h``.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable
from functools import partial
from typing import Any, Final

import torch
from torch import Tensor

from memlog.estimates.cuda_kernels.call import NONE, Blocks, Call, Temporaries
from memlog.estimates.cuda_kernels.gpu import Gpu
from memlog.estimates.cuda_kernels.iteration import reduction
from memlog.estimates.cuda_kernels.reductions import Kernel, accumulation, buffers

_HALF: Final = (torch.float16, torch.bfloat16)
_PAIR: Final = 16
"""Bytes of a value and its index (``pair<scalar_t, int64_t>``)."""


def sums(dtype: torch.dtype, result: torch.dtype) -> Kernel:
    """Return the kernel of ``sum`` and ``mean``, which load twice as many values of 16 bits at once."""
    half = dtype in _HALF
    return Kernel(
        4 if half else result.itemsize, 8 if half else 4, _threads(dtype), _in_output(dtype, result)
    )


def norms(dtype: torch.dtype, result: torch.dtype) -> Kernel:
    size = 4 if dtype in _HALF else result.itemsize
    return Kernel(size, threads=_threads(dtype), in_output=_in_output(dtype, result))


def extremes(dtype: torch.dtype, _: torch.dtype) -> Kernel:
    return Kernel(dtype.itemsize, in_output=dtype not in _HALF)


def pairs_of_extremes(dtype: torch.dtype, _: torch.dtype) -> Kernel:
    return Kernel(2 * dtype.itemsize, in_output=False)


def indices(*_: torch.dtype) -> Kernel:
    return Kernel(_PAIR, in_output=False)


def moments(dtype: torch.dtype, _: torch.dtype) -> Kernel:
    """Return the kernel of variances, with a mean, a sum of squares and two counts (``WelfordData``)."""
    return Kernel(32 if dtype is torch.float64 else 16, 2, in_output=False)


def logical(*_: torch.dtype) -> Kernel:
    return Kernel(1)


def _threads(dtype: torch.dtype) -> int:
    return 256 if dtype is torch.complex128 else 512


def _in_output(dtype: torch.dtype, result: torch.dtype) -> bool:
    return dtype not in _HALF or dtype is not result


def reduced(
    gpu: Gpu,
    tensor: Tensor,
    dims: Collection[int],
    kernel: Kernel,
    result_itemsize: int,
) -> Blocks:
    """Return the buffers of a reduction of ``dims``."""
    if not tensor.numel():
        return NONE
    dims = [dim % tensor.ndim for dim in dims] if tensor.ndim else ()
    itemsize = tensor.element_size()
    walk = reduction(
        tensor.shape, tensor.stride(), dims, itemsize=itemsize, result_itemsize=result_itemsize
    )
    found: Blocks = ()
    for part in buffers(gpu, walk, kernel, itemsize, int(tensor.storage_offset())):
        found += (*part, *(-size for size in reversed(part)))
    held = accumulation(walk, kernel, result_itemsize)
    return (held, *found, -held) if held else found


def of_all(gpu: Gpu, numel: int, dtype: torch.dtype) -> Blocks:
    """Return the buffers of the sum or the mean of all values of a contiguous tensor."""
    return reduced(
        gpu,
        torch.empty(numel, dtype=dtype, device="meta"),
        (0,),
        sums(dtype, dtype),
        dtype.itemsize,
    )


def _reduction(kernel: Any, cast: bool, call: Call) -> Blocks:
    """Return the buffers of an operation with arguments named ``self`` and ``dim``.

    ``cast``: True if the kernel casts its input to the type of the result, except from 16 bits to float32.
    """
    tensor, out = call.first, call.out
    result = out[0] if isinstance(out, tuple) else out
    itemsize, dtype = result.element_size(), tensor.dtype
    copied: Tensor | None = None
    if (
        cast
        and dtype is not result.dtype
        and not (dtype in _HALF and result.dtype is torch.float32)
    ):
        copied, dtype = tensor, result.dtype
        tensor = like(tensor, dtype)
    blocks = reduced(
        call.gpu, tensor, dims_of(tensor, call["dim"]), kernel(dtype, result.dtype), itemsize
    )
    if copied is None:
        return blocks
    size = tensor.numel() * itemsize
    return (size, *blocks, -size)


def like(tensor: Tensor, dtype: torch.dtype) -> Tensor:
    """Return a tensor of another type, with the layout in which ``to`` makes it."""
    return torch.empty_like(tensor, dtype=dtype, device="meta")


def dims_of(tensor: Tensor, given: int | Iterable[int] | None) -> list[int]:
    """Return the reduced dimensions. ``None`` and an empty list stand for all."""
    found = [given] if isinstance(given, int) else list(given or ())
    return found or list(range(tensor.ndim))


def _norm(call: Call) -> Blocks:
    """Return the buffers of ``linalg_vector_norm``, which computes in the type of its result."""
    return _reduction(norms, True, call)


_AS_SUM = "sum mean nansum prod"

TEMPORARIES: Final[dict[str, Temporaries]] = {
    **dict.fromkeys(("sum", "mean"), partial(_reduction, sums, True)),
    **dict.fromkeys(("linalg_vector_norm", "norm"), _norm),
    **dict.fromkeys(("amax", "amin"), partial(_reduction, extremes, False)),
    **dict.fromkeys(("max", "min"), partial(_reduction, indices, False)),
    **dict.fromkeys(("argmax", "argmin"), partial(_reduction, indices, False)),
    **dict.fromkeys(("var", "std", "var_mean", "std_mean"), partial(_reduction, moments, False)),
    **dict.fromkeys(("any", "all"), partial(_reduction, logical, False)),
    "aminmax": partial(_reduction, pairs_of_extremes, False),
}

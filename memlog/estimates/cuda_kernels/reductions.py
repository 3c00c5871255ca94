"""Calls of CUDA's kernels, and buffers of reductions, in which several blocks of threads compute one value.

The rules are those of ``reorder_dimensions``, ``coalesce_dimensions`` and ``with_32bit_indexing`` in torch's
``aten/src/ATen/TensorIterator.cpp`` (torch 2.13).

The rules are those of ``setReduceConfig`` and ``gpu_reduce_kernel`` in torch's
``aten/src/ATen/native/cuda/Reduce.cuh`` (torch 2.13).

Sources: ``ReduceSumProdKernel.cu``, ``ReduceMomentKernel.cu``, ``ReduceNormKernel.cu``,
``ReduceMinValuesKernel.cu``, ``ReduceArgMaxKernel.cu``, ``ReduceLogicKernel.cu`` and
``ReduceAMinMaxKernel.cu`` in torch's ``aten/src/ATen/native/cuda``, and ``ReduceOpsUtils.h``.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from functools import cached_property, partial
from math import prod
from typing import Any, Final, NamedTuple, TypeAlias

import torch
from torch import Tensor

from memlog.tracer.engines.op_workspace import RESULTS


class Gpu(NamedTuple):
    """GPU, with properties as in CUDA's ``cudaDeviceProp``."""

    name: str
    capability: tuple[int, int]
    processors: int
    """Number of multiprocessors (``multiProcessorCount``)."""
    threads: int = 2048
    """Maximum number of threads of one multiprocessor (``maxThreadsPerMultiProcessor``)."""


A100: Final = Gpu("A100", (8, 0), 108)


Blocks: TypeAlias = tuple[int, ...]
"""Bytes that an operation allocates (positive) and frees (negative) beside its results, in order."""
NONE: Final[Blocks] = ()


class Call:
    """Call of an operation on fake tensors, which stand for tensors on a GPU.

    Attributes:
        gpu: The GPU.
        args: All arguments by name, also those that have their default.
        out: The operation's result.
    """

    def __init__(self, gpu: Gpu, func: Any, args: Any, kwargs: Any, out: Any) -> None:
        self.gpu = gpu
        self.func = func
        self.out = out
        self._args, self._kwargs = args, kwargs

    @cached_property
    def args(self) -> dict[str, Any]:
        schema = self.func._schema.arguments
        named = {
            argument.name: argument.default_value
            for argument in schema
            if argument.has_default_value()
        }
        names = (argument.name for argument in schema if not argument.kwarg_only)
        return named | dict(zip(names, self._args, strict=False)) | (self._kwargs or {})

    def __getitem__(self, name: str) -> Any:
        return self.args.get(name)

    @property
    def first(self) -> Tensor:
        """First argument, for operations whose first argument is a tensor."""
        tensor: Tensor = self._args[0]
        return tensor


Temporaries: TypeAlias = Callable[[Call], Blocks]
"""Function that returns an operation's temporary buffers."""


def beside(*sizes: int) -> Blocks:
    """Return buffers that an operation allocates after its results, and frees in the reverse order."""
    return taken(sizes)


def taken(sizes: Iterable[int]) -> Blocks:
    given = tuple(size for size in sizes if size)
    return given + tuple(-size for size in reversed(given))


def around_results(*sizes: int) -> Blocks:
    """Return buffers that an operation allocates before its results, and frees after them."""
    given = tuple(size for size in sizes if size)
    return (*given, RESULTS, *(-size for size in reversed(given))) if given else NONE


def copy_bytes(tensor: Tensor | None) -> int:
    """Return the bytes of a contiguous copy of a tensor; 0 if it is contiguous already."""
    if tensor is None or tensor.is_contiguous():
        return 0
    return bytes_of(tensor)


def bytes_of(tensor: Tensor) -> int:
    return tensor.numel() * tensor.element_size()


_MOST = 2**31 - 1
"""Largest number of values, and largest offset in bytes, of a kernel with indices of 32 bits."""


class Reduction(NamedTuple):
    """Walk through the input of a reduction. The reduced dimensions are first, each group the fastest first.

    Strides are in bytes.
    """

    shape: tuple[int, ...]
    strides: tuple[int, ...]
    results: tuple[int, ...]
    """Strides of the result: 0 for the reduced dimensions."""

    @property
    def reduced(self) -> int:
        """Number of reduced dimensions."""
        return self.results.count(0)

    @property
    def outputs(self) -> int:
        return prod(self.shape[self.reduced :])

    def parts(self) -> Iterator[Reduction]:
        """Return the parts that kernels with indices of 32 bits compute one after the other."""
        if prod(self.shape) <= _MOST and all(
            sum((length - 1) * stride for length, stride in zip(self.shape, steps, strict=True))
            < _MOST
            for steps in (self.strides, self.results)
        ):
            yield self
            return
        at = self._longest()
        length = self.shape[at]
        for part in (length // 2, length - length // 2):
            yield from self._replace(shape=(*self.shape[:at], part, *self.shape[at + 1 :])).parts()

    def _longest(self) -> int:
        """Return the dimension with the largest extent in bytes (``get_dim_to_split``)."""
        best, longest = -1, 0
        # If extents are equal, the first in this order wins, as in torch.
        for at in reversed(range(len(self.shape))):
            for stride in (self.results[at], self.strides[at]):
                extent = (self.shape[at] - 1) * stride
                if extent > best:
                    best, longest = extent, at
        return longest


def reduction(
    shape: Sequence[int],
    strides: Sequence[int],
    dims: Collection[int],
    *,
    itemsize: int,
    result_itemsize: int,
) -> Reduction:
    """Return the walk of a reduction of ``dims`` over a tensor. ``strides`` are numbers of values."""
    kept, step = [0] * len(shape), result_itemsize
    for at in reversed(range(len(shape))):
        if at not in dims:
            kept[at] = step
            step *= max(1, shape[at])
    kept = [
        0 if length == 1 and at in dims else result_step
        for at, (result_step, length) in enumerate(zip(kept, shape, strict=True))
    ]
    order = _order(shape, kept, [stride * itemsize for stride in strides])
    return _coalesced(
        [shape[at] for at in order],
        [strides[at] * itemsize for at in order],
        [kept[at] for at in order],
    )


def _order(shape: Sequence[int], results: Sequence[int], strides: Sequence[int]) -> list[int]:
    order = list(reversed(range(len(shape))))
    for start in range(1, len(order)):
        at = start
        for before in reversed(range(start)):
            comparison = _compared(shape, results, strides, order[before], order[at])
            if comparison > 0:
                order[before], order[at] = order[at], order[before]
                at = before
            elif comparison < 0:
                # 0 means that the order is undecided. Then torch compares with the next dimension before it.
                break
    return order


def _compared(
    shape: Sequence[int], results: Sequence[int], strides: Sequence[int], one: int, other: int
) -> int:
    """Return 1 if dimension ``one`` comes after ``other``, -1 if before, 0 if that is not decided."""
    if (results[one] == 0) != (results[other] == 0):
        return 1 if results[other] == 0 else -1
    for steps in (results, strides):
        if steps[one] == 0 or steps[other] == 0:
            continue
        if steps[one] != steps[other]:
            return -1 if steps[one] < steps[other] else 1
        if shape[one] > shape[other]:
            return 1
    return 0


def _coalesced(shape: list[int], strides: list[int], results: list[int]) -> Reduction:
    """Return the walk with neighbouring dimensions joined, if the strides allow it."""
    if len(shape) <= 1:
        return Reduction(tuple(shape), tuple(strides), tuple(results))
    last = 0
    for at in range(1, len(shape)):
        joined = 1 in (shape[last], shape[at]) or all(
            shape[last] * steps[last] == steps[at] for steps in (strides, results)
        )
        if joined:
            if shape[last] == 1:
                strides[last], results[last] = strides[at], results[at]
            shape[last] *= shape[at]
        else:
            last += 1
            shape[last], strides[last], results[last] = shape[at], strides[at], results[at]
    return Reduction(*(tuple(steps[: last + 1]) for steps in (shape, strides, results)))


_WARP: Final = 32
_FEWEST_VALUES, _MOST_VALUES = 16, 256
"""Numbers of values that one thread should reduce at least and at most."""
_OUTPUT_VECTOR: Final = 4
_SEMAPHORE: Final = 4  # bytes of an int
_VECTORIZED: Final = 128


class Kernel(NamedTuple):
    """Template arguments of a reduction's kernel.

    Attributes:
        accumulator: Bytes of the type in which the kernel accumulates (``arg_t``).
        vector: Number of values that a thread loads at once (``input_vec_size``).
        threads: Most threads of a block (``mnt_wrapper``).
        in_output: True if parts of the reduction are accumulated in the result.
    """

    accumulator: int
    vector: int = 4
    threads: int = 512
    in_output: bool = True


def buffers(
    gpu: Gpu, walk: Reduction, kernel: Kernel, itemsize: int, offset: int = 0
) -> list[tuple[int, ...]]:
    """Return the buffers of a reduction: for each kernel, the bytes that it takes at the same time.

    ``itemsize``: Bytes of a value of the input. ``offset``: Values before the input in its storage.
    """
    parts = list(walk.parts())
    by_part = [_of_kernel(gpu, part, kernel, itemsize, offset) for part in parts]
    return [sizes for sizes in by_part if sizes]


def accumulation(walk: Reduction, kernel: Kernel, result_itemsize: int) -> int:
    """Return the bytes in which parts of a large reduction are accumulated; 0 if the result holds them."""
    if kernel.in_output or len(list(walk.parts())) < 2:  # noqa: PLR2004
        return 0
    extents = (length * stride for length, stride in zip(walk.shape, walk.results, strict=True))
    return max(result_itemsize, *extents) // result_itemsize * kernel.accumulator


def _of_kernel(
    gpu: Gpu, walk: Reduction, kernel: Kernel, itemsize: int, offset: int
) -> tuple[int, ...]:
    outputs = walk.outputs
    inputs = prod(walk.shape) // outputs
    reduced = walk.reduced
    # The threads of a warp read along the input's fastest dimension, which is either reduced or not.
    along_input = reduced == len(walk.shape) or walk.strides[0] < walk.strides[reduced]
    width, height = (inputs, outputs) if along_input else (outputs, inputs)
    fastest = (walk.strides or (itemsize,))[0 if along_input else reduced]
    vector = 1
    # Threads load vectors only if the values lie side by side.
    if fastest == itemsize:
        if along_input and width >= _VECTORIZED and reduced == 1:
            width //= kernel.vector
        elif not along_input:
            vector = _output_vector(walk, itemsize, offset)
            width //= vector
    block = _block(width, height, kernel.threads // vector)
    step_input, step_output = (block[0], 1) if along_input else (1, block[0])
    # The warps of a block share the values of a result only if enough values are left for each thread.
    split = _up(inputs, step_input) >= min(block[1] * _FEWEST_VALUES, _MOST_VALUES)
    if split:
        step_input *= block[1]
    else:
        step_output *= block[1]
    target = gpu.processors * (gpu.threads // (block[0] * block[1]))
    grid = _up(outputs // vector, step_output)
    values = _up(inputs, step_input)
    # Several blocks share a result only if each thread has many values and there are few results.
    if not split or values < _MOST_VALUES or grid > target:
        return ()
    blocks = max(min(_up(target, grid), _up(values, _FEWEST_VALUES)), _up(values, _MOST_VALUES))
    if blocks <= 1:
        return ()
    size = kernel.accumulator * outputs * blocks
    return (size if along_input else size * block[0] * vector), _SEMAPHORE * grid


def _output_vector(walk: Reduction, itemsize: int, offset: int) -> int:
    """Return how many results a thread computes at once (``get_output_vec_size``)."""
    at = walk.reduced
    others = [stride // itemsize for i, stride in enumerate(walk.strides) if i != at]
    size = _OUTPUT_VECTOR
    for number in (offset, walk.shape[at], *others):
        while number % size:
            size //= 2
    return size


def _block(width: int, height: int, threads: int) -> tuple[int, int]:
    """Return the sides of a block of threads (``set_block_dimension``)."""
    most_wide, most_high = (_power_of_two(min(side, threads)) for side in (width, height))
    high = min(most_high, threads // min(most_wide, _WARP))
    return min(most_wide, threads // high), high


def _power_of_two(number: int) -> int:
    """Return the largest power of two that is at most ``number``; 1 for 0."""
    return 1 << max(0, number.bit_length() - 1)


def _up(number: int, divisor: int) -> int:
    return -(-number // divisor)


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
    blocks: Blocks = ()
    for part in buffers(gpu, walk, kernel, itemsize, int(tensor.storage_offset())):
        blocks += (*part, *(-size for size in reversed(part)))
    held = accumulation(walk, kernel, result_itemsize)
    return (held, *blocks, -held) if held else blocks


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
    dims = [given] if isinstance(given, int) else list(given or ())
    return dims or list(range(tensor.ndim))


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

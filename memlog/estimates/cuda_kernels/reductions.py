"""Buffers of reductions, in which several blocks of threads compute one value.

The rules are those of ``setReduceConfig`` and ``gpu_reduce_kernel`` in torch's
``aten/src/ATen/native/cuda/Reduce.cuh`` (torch 2.13).
"""

from __future__ import annotations

from math import prod
from typing import Final, NamedTuple

from memlog.estimates.cuda_kernels.gpu import Gpu
from memlog.estimates.cuda_kernels.iteration import Reduction

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
    found = [_of_kernel(gpu, part, kernel, itemsize, offset) for part in parts]
    return [each for each in found if each]


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
    along_input = reduced == len(walk.shape) or walk.strides[0] < walk.strides[reduced]
    width, height = (inputs, outputs) if along_input else (outputs, inputs)
    fastest = (walk.strides or (itemsize,))[0 if along_input else reduced]
    vector = 1
    if fastest == itemsize:
        if along_input and width >= _VECTORIZED and reduced == 1:
            width //= kernel.vector
        elif not along_input:
            vector = _output_vector(walk, itemsize, offset)
            width //= vector
    block = _block(width, height, kernel.threads // vector)
    step_input, step_output = (block[0], 1) if along_input else (1, block[0])
    split = _up(inputs, step_input) >= min(block[1] * _FEWEST_VALUES, _MOST_VALUES)
    if split:
        step_input *= block[1]
    else:
        step_output *= block[1]
    target = gpu.processors * (gpu.threads // (block[0] * block[1]))
    grid = _up(outputs // vector, step_output)
    values = _up(inputs, step_input)
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

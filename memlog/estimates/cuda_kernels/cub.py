"""Temporary storage of CUB's device-wide algorithms, which torch uses to sort and to scan.

CUB divides the values into tiles, and stores a state for each tile. The sizes of tiles depend on the sizes of
values and on the compute capability. They are CUB's tuning policies (``cub/device/dispatch/tuning`` in
https://github.com/NVIDIA/cccl), as CUDA 13 compiles them into torch 2.13.
"""

from __future__ import annotations

from typing import Final

from memlog.estimates.cuda_kernels.call import Gpu

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
    if passes == 1:
        copies = 0
    if tile is None:
        return copies + gpu.processors * _PASSES_OF_HALF[generation]
    tiles = -(-count // tile)
    arrays = (passes * _DIGITS * _COUNTER, tiles * _DIGITS * 4, passes * 4)
    return _ALIGNMENT - 1 + copies + sum(map(_aligned, arrays))


def scan(count: int, itemsize: int) -> int:
    """Return the bytes with which CUB computes the running sums of ``count`` values."""
    tile, state, others = _SCAN_TILES.get(itemsize, _SCAN_TILES[4])
    return _states(count, tile, state) + others * _ALIGNMENT


def unique(gpu: Gpu, count: int) -> int:
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

"""Properties of a GPU from which torch computes the sizes of temporary buffers."""

from __future__ import annotations

from typing import Final, NamedTuple


class Gpu(NamedTuple):
    """GPU, with properties as in CUDA's ``cudaDeviceProp``."""

    name: str
    capability: tuple[int, int]
    processors: int
    """Number of multiprocessors (``multiProcessorCount``)."""
    threads: int = 2048
    """Maximum number of threads of one multiprocessor (``maxThreadsPerMultiProcessor``)."""


A100: Final = Gpu("A100", (8, 0), 108)

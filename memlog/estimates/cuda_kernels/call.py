"""Call of one operation, and the GPU's properties: the temporary buffers are computed from both."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from functools import cached_property
from typing import Any, Final, NamedTuple, TypeAlias

from torch import Tensor

from memlog.tracer.engines.cpu.op_workspace import RESULTS


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
        named = {one.name: one.default_value for one in schema if one.has_default_value()}
        names = (one.name for one in schema if not one.kwarg_only)
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

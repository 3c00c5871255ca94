"""Memory that torch's wrappers for several ranks allocate: unsharded parameters, communication buffers."""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable, Iterable
from contextlib import AbstractContextManager, suppress
from typing import Any, Final

import torch.distributed as dist

from memlog.trace.encoding import COMMUNICATION, UNSHARDED
from memlog.tracer.hooks.function_patch import AroundPatch

_Context = Callable[[], AbstractContextManager[object]]
_FSDP: Final = "torch.distributed.fsdp._fully_shard."
_FUNCTIONS: Final = (
    (_FSDP + "_fsdp_param", "FSDPParam.init_all_gather_outputs", UNSHARDED),
    (_FSDP + "_fsdp_param", "FSDPParam.alloc_all_gather_outputs", UNSHARDED),
    (_FSDP + "_fsdp_param_group", "foreach_all_gather", COMMUNICATION),
    (_FSDP + "_fsdp_param_group", "foreach_reduce", COMMUNICATION),
    ("torch.nn.parallel.distributed", "DistributedDataParallel.__init__", COMMUNICATION),
    ("torch.distributed", "Reducer._rebuild_buckets", COMMUNICATION),
)
"""Functions of torch: module, name in the module, and category of what the function allocates."""
_patches: dict[str, tuple[AroundPatch, int]] = {}


class WrapperMemory:
    """Categories of what the wrappers allocate from `begin` to `end`.

    Functions of modules that are imported later are not patched.

    Args:
        made_as: Function that returns a context for a category. What the thread allocates in the context gets
            the category.
    """

    def __init__(self, made_as: Callable[[int], AbstractContextManager[object]]) -> None:
        self._inside = {
            category: functools.partial(_inside, functools.partial(made_as, category))
            for category in (UNSHARDED, COMMUNICATION)
        }
        self._used: list[tuple[AroundPatch, int]] = []

    def begin(self) -> None:
        if not _has_ranks():
            return
        for module, path, category in _FUNCTIONS:
            owner = sys.modules.get(module)
            *kind, name = path.split(".")
            for each in kind:
                owner = getattr(owner, each, None)
            if path not in _patches and hasattr(owner, name):
                _patches[path] = AroundPatch(owner, name), category
        self._used = list(_patches.values())
        for patch, category in self._used:
            patch.add(self._inside[category])

    def end(self) -> None:
        for patch, category in self._used:
            patch.remove(self._inside[category])


def _has_ranks() -> bool:
    return dist.is_available() and dist.is_initialized()


def _inside(context: _Context, function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    with context():
        return function(*args, **kwargs)


def bucket_sizes(roots: Iterable[Any]) -> list[int]:
    """Return the bytes of the buffers in which DistributedDataParallel reduces the gradients of ``roots``.

    The second step replaces the first step's buffers. Those that torch keeps longer are left out. torch tells
    the sizes, but not the addresses. Gradients that are views of the buffers are left out, too.
    """
    sizes: list[int] = []
    for root in roots if _has_ranks() else ():
        with suppress(Exception):  # no such wrapper, or a torch that tells less
            told = root._get_ddp_logging_data()
            if not told.get("gradient_as_bucket_view"):
                text = told.get("rebuilt_bucket_sizes") or told["bucket_sizes"]
                sizes += map(int, text.split(", "))
    return sizes

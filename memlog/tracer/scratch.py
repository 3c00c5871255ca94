"""What an operation allocates and frees inside itself, which no dispatch mode sees.

oneDNN's convolutions copy their arguments into layouts of their own: a sixth of a UNet's peak. torch's old
profiler reports the allocator's events of one operation in some 30 µs, and what an operation takes depends on
the shapes alone, so each operation that is known for such needs is measured once for each of them.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor

from memlog.tracer import private

_NAMES = (
    "conv",
    "mkldnn",
    "rnn",
    "lstm",
    "gru",
    "attention",
    "fft",
    "linalg",
    "sort",
    "topk",
    "unique",
    "index_put",
)
"""Parts of the names of operations that are measured; asking for shapes costs as much as a small one."""

_MAX_KNOWN = 10_000


class Scratch(NamedTuple):
    """Bytes that one operation takes."""

    peak: int
    """Most at a time, its results included."""
    kept: int
    """Its results."""


_known: dict[Any, Scratch] = {}


def may_need(func: Any) -> bool:
    """Whether an operation is one of those that are measured."""
    name = func._schema.name
    return any(part in name for part in _NAMES)


def run(func: Any, args: Any, kwargs: Any) -> tuple[Any, Scratch | None]:
    """Runs an operation.

    Returns:
        Its result, and what it took inside; ``None`` where nobody can tell: another profiler is on, or this
        torch lacks the old one.
    """
    try:
        settings = torch.get_num_threads(), torch.backends.mkldnn.enabled
        key = (func, settings, *map(_signature, args), *map(_signature, kwargs.items()))
        known = _known.get(key)
    except Exception:  # noqa: BLE001 - an argument without a shape or hash: training goes on
        return func(*args, **kwargs), None
    if known is not None:
        return func(*args, **kwargs), known
    return _measured(key, func, args, kwargs)


def _measured(key: Any, func: Any, args: Any, kwargs: Any) -> tuple[Any, Scratch | None]:
    begin, end = private.allocation_profiler()
    if begin is None or end is None or not _begun(begin):
        return func(*args, **kwargs), None
    records = None
    try:
        out = func(*args, **kwargs)
    finally:
        records = end()
    level = peak = 0
    for record in (record for thread in records for record in thread):
        if record.kind() == "memory_alloc":
            level += record.cpu_memory_usage()
            peak = max(peak, level)
    if len(_known) < _MAX_KNOWN:
        _known[key] = Scratch(peak, level)
    return out, Scratch(peak, level)


def _begun(begin: Callable[[], Any]) -> bool:
    try:
        begin()
    except RuntimeError:
        return False  # a profiler is on already, which is not ours to end
    return True


def _signature(value: Any) -> Any:
    if isinstance(value, Tensor):
        # A fake tensor's operation runs without taking anything, which says nothing of a real one's.
        return hasattr(value, "fake_mode"), tuple(value.shape), value.stride(), value.dtype
    if isinstance(value, (list, tuple)):
        return tuple(map(_signature, value))
    return value

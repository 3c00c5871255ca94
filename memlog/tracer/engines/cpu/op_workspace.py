"""What an operation allocates and frees inside itself, which no dispatch mode sees.

oneDNN's convolutions copy their arguments into layouts of their own: a sixth of a UNet's peak. torch's old
profiler reports the allocator's events of one operation in some 30 µs, and what an operation takes depends on
the shapes alone, so each is measured once for each of them; at every call where its arguments' values decide.
What is known to take nothing is not measured.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any, Final, NamedTuple

import torch
from torch import Tensor

from memlog.tracer import torch_private

NOTHING_INSIDE: Final = 0
"""It takes nothing but its results."""
MEASURED: Final = 1
BY_TYPES: Final = 3
"""Nothing, if its arguments have one type; else it casts some of them inside itself, which is measured."""
UNKNOWN: Final = 2
"""The program's own, or another library's: nobody measures it, since it may do anything at all."""

_NAMESPACES = ("aten", "mkldnn", "quantized", "torchvision")
"""Whose operations are measured."""

_NAMES = """
    arange bernoulli cat clone copy detach empty empty_like empty_strided exponential eye fill full full_like
    lift_fresh linspace new_empty new_empty_strided new_full new_ones new_zeros normal ones ones_like rand
    rand_like randint randint_like randn randn_like random resize scalar_tensor select_backward set
    slice_backward stack uniform zero zeros zeros_like
    _fused_adagrad _fused_adam _fused_adamw _fused_sgd _local_scalar_dense _reshape_alias _to_copy
    _unsafe_view
"""
_NONE = frozenset(_NAMES.split())
"""Operations that take nothing inside, beside views and those that torch marks as pointwise."""

_COPIED = frozenset(("gelu", "gelu_backward"))
"""Pointwise operations that oneDNN computes, in layouts of its own."""

_BY_INDEX = frozenset(("index", "index_put", "_index_put_impl", "_unsafe_index"))
_MASKS = (torch.bool, torch.uint8)
_PLAIN = (int, float, str, type(None), torch.dtype, torch.memory_format)
"""Arguments whose values count; of others (a random number generator) it is the class, and none is kept."""

_MAX_KNOWN = 10_000


class Workspace(NamedTuple):
    """Bytes that one operation takes."""

    peak: int
    """Most at a time, its results included."""
    kept: int
    """Its results."""


class _LastMeasurement(threading.local):
    """What a mode further down this thread's stack has measured last."""

    func: Any = None
    found: Workspace | None = None


_last_measured = _LastMeasurement()
_known: dict[Any, Workspace] = {}
_precisions: tuple[str, ...] = ()
_by_value: dict[Any, bool] = {}


def update_precisions() -> bool:
    """What was measured counts for the precision alone that oneDNN computes in.

    Returns:
        Whether that is another than when this was called last.
    """
    global _precisions
    before, _precisions = _precisions, torch_private.onednn_precisions()
    return before != _precisions


def workspace_class(func: Any) -> int:
    """What is known of an operation's inside, by its name and schema."""
    schema = getattr(func, "_schema", None)
    if schema is None:
        return UNKNOWN  # of a higher order
    namespace, _, name = schema.name.partition("::")
    name = name if name.startswith("__") else name.rstrip("_")
    if namespace in ("prim", "profiler"):
        return NOTHING_INSIDE
    if namespace not in _NAMESPACES:
        return UNKNOWN
    pointwise = getattr(torch.Tag, "pointwise", None)
    if name in _NONE or name.startswith("_foreach"):
        return NOTHING_INSIDE
    if pointwise in func.tags and name not in _COPIED:
        return BY_TYPES
    writes = any(one.alias_info is not None and one.alias_info.is_write for one in schema.arguments)
    views = all(one.alias_info is not None for one in schema.returns)
    return NOTHING_INSIDE if views and not writes else MEASURED


def mixes_types(args: Any) -> bool:
    """Whether a pointwise operation casts one of its arguments to the type of another."""
    kind = None
    for value in args:
        if isinstance(value, Tensor) and value.ndim:
            if kind is None:
                kind = value.dtype
            elif kind is not value.dtype:
                return True
    return kind is not None and not kind.is_floating_point and any(map(_is_fraction, args))


def _is_fraction(value: Any) -> bool:
    return value.is_floating_point() if isinstance(value, Tensor) else isinstance(value, float)


def run(func: Any, args: Any, kwargs: Any) -> tuple[Any, Workspace | None]:
    """Runs an operation.

    Returns:
        Its result, and what it took inside; ``None`` where nobody can tell: another profiler is on, or this
        torch lacks the old one.
    """
    try:
        key = _key(func, args, kwargs)
        known = _known.get(key) if key is not None else None
    except Exception:  # noqa: BLE001 - an argument without a shape or hash: training goes on
        key = known = None
    if known is not None:
        return func(*args, **kwargs), known
    return _measured(key, func, args, kwargs)


def _key(func: Any, args: Any, kwargs: Any) -> Any:
    """What decides what an operation takes; ``None`` where that is the values of its arguments."""
    if depends_on_values(func):
        return None
    signature = [func, torch.get_num_threads(), torch._C._get_mkldnn_enabled(), _precisions]
    for value in args:
        if isinstance(value, Tensor):
            if value.layout is not torch.strided:
                return None
            # A fake tensor's operation runs without taking anything, which says nothing of a real one's.
            signature += (type(value), value.shape, value.stride(), value.dtype)
        elif isinstance(value, (list, tuple)):
            if func.overloadpacket.__name__.rstrip("_") in _BY_INDEX and _has_mask(value):
                return None
            signature.append(tuple(map(_signature, value)))
        else:
            signature.append(value if isinstance(value, _PLAIN) else type(value))
    if kwargs:
        signature += ((name, _signature(value)) for name, value in kwargs.items())
    return tuple(signature)


def depends_on_values(func: Any) -> bool:
    """Whether the size of what an operation returns is decided by its arguments' values."""
    found = _by_value.get(func)
    if found is None:
        tags = {getattr(torch.Tag, name, None) for name in ("dynamic_output_shape",)}
        indexed = func.overloadpacket.__name__.rstrip("_") in _BY_INDEX
        found = _by_value[func] = bool(tags.intersection(func.tags)) and not indexed
    return found


def _measured(key: Any, func: Any, args: Any, kwargs: Any) -> tuple[Any, Workspace | None]:
    if any(getattr(mode, "measures", False) for mode in torch_private.mode_stack()):
        return _measured_below(func, args, kwargs)
    start, end = torch_private.allocation_profiler()
    if start is None or end is None or not _started(start):
        return func(*args, **kwargs), None
    records: Any = ()
    try:
        out = func(*args, **kwargs)
    finally:
        records = _ended(end)
    level = peak = 0
    for record in (record for thread in records for record in thread):
        if record.kind() == "memory_alloc":
            level += record.cpu_memory_usage()
            peak = max(peak, level)
    found = Workspace(peak, level)
    if key is not None and len(_known) < _MAX_KNOWN:
        _known[key] = found
    _last_measured.func, _last_measured.found = func, found
    return out, found


def _measured_below(func: Any, args: Any, kwargs: Any) -> tuple[Any, Workspace | None]:
    """Another tracer's mode comes next, which sees the same operation: one profiler serves both."""
    _last_measured.func = None
    out = func(*args, **kwargs)
    return out, _last_measured.found if _last_measured.func is func else None


def _started(start: Callable[[], Any]) -> bool:
    try:
        start()
    except RuntimeError:
        return False  # a profiler is on already, which is not ours to end
    return True


def _ended(end: Callable[[], Any]) -> Any:
    try:
        return end()
    except RuntimeError:
        return ()  # the operation has ended it


def _has_mask(values: Any) -> bool:
    return any(isinstance(value, Tensor) and value.dtype in _MASKS for value in values)


def _signature(value: Any) -> Any:
    if isinstance(value, Tensor):
        return type(value), value.shape, value.stride(), value.dtype
    if isinstance(value, (list, tuple)):
        return tuple(map(_signature, value))
    return value if isinstance(value, _PLAIN) else type(value)

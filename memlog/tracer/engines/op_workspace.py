"""Workspace: bytes that an operation allocates and frees inside itself. No dispatch mode sees these bytes.

oneDNN's convolutions, for example, copy their arguments into oneDNN's own layouts. These copies are a sixth
of a UNet's peak. torch's legacy profiler reports the allocator's events of one operation in about 30 µs. The
workspace usually depends on shapes alone, so each operation is measured once for each combination of shapes.
If the workspace depends on the values of arguments, the operation is measured at every call. Operations
without workspace are not measured.
"""

from __future__ import annotations

import functools
import gc
import threading
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from math import prod
from time import thread_time
from typing import Any, Final, NamedTuple

import torch
from torch import Tensor

from memlog._internal.signals import raised_by_handler
from memlog.torchside import internals
from memlog.torchside.tensors import onednn_enabled
from memlog.tracer.engines.simulated_step import SIMULATED

NO_WORKSPACE: Final = 0
"""Class of operations that allocate nothing but their results."""
MEASURED: Final = 16  # MEASURED, UNMEASURED and BY_TYPES are bits above `dispatch_mode.RESULT`
UNMEASURED: Final = 32
"""Class of operations of the program or of another library. They are not measured, since they may do
anything."""
BY_TYPES: Final = 64
"""Class of operations that have no workspace if all arguments have one type. Otherwise the operation casts
arguments, and is measured."""

RESULTS: Final = 0
"""Number that stands for the allocation of an operation's results in `Workspace.blocks`. If it is there
several times, each stands for one result, and the last for all that are left."""

_NAMESPACES = ("aten", "mkldnn", "quantized", "torchvision")
"""Namespaces of the operations that are measured."""

_NAMES = """
    arange cat clone copy detach empty empty_like empty_strided exponential eye fill full full_like
    lift_fresh linspace new_empty new_empty_strided new_full new_ones new_zeros normal ones ones_like rand
    rand_like randint randint_like randn randn_like random resize scalar_tensor select_backward set
    slice_backward stack uniform zero zeros zeros_like
    _fused_adagrad _fused_adam _fused_adamw _fused_sgd _local_scalar_dense _reshape_alias _to_copy
    _unsafe_view
"""
_NONE = frozenset(_NAMES.split())
"""Names of operations without workspace. Views, and operations that torch marks as pointwise, are not
listed."""

_FOREACH = frozenset(("_foreach_max", "_foreach_norm", "_foreach_powsum"))
"""Operations on lists of tensors that are measured, because they reduce each tensor in several parts."""

_COPIED = frozenset(("gelu", "gelu_backward"))
"""Pointwise operations that are measured, because oneDNN computes them in its own layouts."""

_BY_INDEX = frozenset(("index", "index_put", "_index_put_impl", "_unsafe_index"))
_MASKS = (torch.bool, torch.uint8)
_PLAIN = (int, float, str, type(None), torch.dtype, torch.memory_format)
"""Types of arguments whose values are part of a measurement's key. For other arguments, such as a random
number generator, the key contains only the class. So the key keeps no reference to these arguments."""

_MAX_KNOWN = 10_000


class Workspace(NamedTuple):
    """Bytes that one operation allocates."""

    peak: int
    """Highest number of bytes at one time, results included."""
    kept: int
    """Bytes of the results."""
    blocks: tuple[int, ...] | None = None
    """Bytes that the operation allocates (positive) and frees (negative) beside its results, in order. The
    number `RESULTS` among them stands for the allocation of the results. ``None``: not known one by one."""
    complete: bool = True
    """False if the operation allocates more inside itself, of unknown size."""
    order: tuple[int, ...] = ()
    """Indices of the results in the order of their allocation; empty: one after another."""


class _LastMeasurement(threading.local):
    """Last measurement on this thread. If tracers are nested, one measures and the others read the result."""

    func: Any = None
    found: Workspace | None = None


_last_measured = _LastMeasurement()
_known: dict[Any, Workspace] = {}
_precisions: tuple[str, ...] = ()


def update_precisions() -> bool:
    """Read oneDNN's precisions; return True if they have changed since the last call.

    A measurement is valid only for the precisions in use when it was made.
    """
    global _precisions
    before, _precisions = _precisions, internals.onednn_precisions()
    return before != _precisions


def run_unmeasured(func: Any, args: Any, kwargs: Any) -> tuple[Any, Workspace | None, float]:
    """Run an operation of the class `UNMEASURED`. Return what `run` returns."""
    began = thread_time()
    out = func(*args, **kwargs)
    known = SIMULATED.known_workspace
    workspace = None if known is None else known(func, args, kwargs)
    return out, workspace, thread_time() - began


def workspace_class(func: Any) -> int:
    """Return the class of an operation, such as `NO_WORKSPACE` or `MEASURED`."""
    schema = getattr(func, "_schema", None)
    if schema is None:
        return UNMEASURED  # a higher-order operation
    namespace, _, name = schema.name.partition("::")
    # An underscore at the end marks an operation in place, except in names such as `__and__`.
    name = name if name.startswith("__") else name.rstrip("_")
    if namespace in ("prim", "profiler"):
        return NO_WORKSPACE
    if namespace not in _NAMESPACES:
        return UNMEASURED
    if name in _NONE or (name.startswith("_foreach") and name not in _FOREACH):
        return NO_WORKSPACE
    if torch.Tag.pointwise in func.tags and name not in _COPIED:
        return BY_TYPES
    writes = any(
        argument.alias_info is not None and argument.alias_info.is_write
        for argument in schema.arguments
    )
    views = all(result.alias_info is not None for result in schema.returns)
    return NO_WORKSPACE if views and not writes else MEASURED


def mixes_types(args: Any) -> bool:
    """Return whether a pointwise operation casts one of its arguments to the type of another."""
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


def run(func: Any, args: Any, kwargs: Any) -> tuple[Any, Workspace | None, float]:
    """Run an operation; return its result, its workspace, and the seconds that it took.

    The workspace is ``None`` if it can't be measured, because another profiler is on or this torch has no
    legacy profiler. A measurement counts as time of the operation.
    """
    of_fakes = SIMULATED.measure_fakes
    try:
        once = of_fakes is None or SIMULATED.once_a_shape
        key = _key(func, args, kwargs) if once else None
        known = _known.get(key) if key is not None else None
    except Exception as error:  # an argument without a shape or hash: training goes on
        if raised_by_handler(error):
            raise
        key = known = None
    began = thread_time()
    workspace: Workspace | None = known
    if known is not None:
        out = func(*args, **kwargs)
    elif of_fakes is not None and (not once or any(map(_is_fake, args))):
        out = func(*args, **kwargs)
        workspace = of_fakes(func, args, kwargs, out)
        if workspace is not None and key is not None and len(_known) < _MAX_KNOWN:
            _known[key] = workspace
    else:
        out, workspace = _measured(key, func, args, kwargs)
    return out, workspace, thread_time() - began


def _is_fake(value: Any) -> bool:
    return type(value).__name__ == "FakeTensor"


def _key(func: Any, args: Any, kwargs: Any) -> Any:
    """Return a key for a call of an operation. Calls with the same key have the same workspace.

    Return ``None`` if the workspace depends on the values of the arguments.
    """
    if depends_on_values(func):
        return None
    # Some operations allocate a buffer for each thread.
    signature = [func, torch.get_num_threads(), onednn_enabled(), _precisions]
    signature.append(SIMULATED.measure_fakes is not None)
    for value in args:
        if isinstance(value, Tensor) and value.layout is not torch.strided:
            return None
        if isinstance(value, (list, tuple)) and _is_indexing(func) and _has_mask(value):
            return None
        signature.append(_signature(value))
    if kwargs:
        signature += ((name, _signature(value)) for name, value in kwargs.items())
    return tuple(signature)


@functools.cache
def depends_on_values(func: Any) -> bool:
    """Return whether the values of an operation's arguments decide the size of its result."""
    return torch.Tag.dynamic_output_shape in func.tags and not _is_indexing(func)


@functools.cache
def _is_indexing(func: Any) -> bool:
    return internals.operation_name(func).rstrip("_") in _BY_INDEX


def _measured(key: Any, func: Any, args: Any, kwargs: Any) -> tuple[Any, Workspace | None]:
    if any(getattr(mode, "measures", False) for mode in internals.mode_stack()):
        # Another tracer's mode is below the current mode on the stack, and measures the same operation.
        _last_measured.func = None
        out = func(*args, **kwargs)
        return out, _last_measured.found if _last_measured.func is func else None
    out, sizes = allocations(func, args, kwargs)
    if sizes is None:
        return out, None
    workspace = workspace_of(sizes)
    if key is not None and len(_known) < _MAX_KNOWN:
        _known[key] = workspace
    _last_measured.func, _last_measured.found = func, workspace
    return out, workspace


def allocations(func: Any, args: Any, kwargs: Any) -> tuple[Any, list[int] | None]:
    """Run an operation. Return its result, and the bytes of its allocations (positive) and frees (negative).

    A 0 stands for each call of `internals.mark_profile`. The bytes are ``None`` if they can't be
    measured, because another profiler is on, this torch has no legacy profiler, or a dispatch mode of the
    program has stopped the profiler.
    """
    profiler = internals.allocation_profiler()
    if profiler is None or not _started(profiler[0]):
        return func(*args, **kwargs), None
    collects = gc.isenabled()
    gc.disable()  # a collection's frees would be reported as the operation's
    records: Any = None
    try:
        out = func(*args, **kwargs)
    finally:
        with suppress(RuntimeError):  # the program has stopped the profiler
            records = profiler[1]()
        if collects:
            gc.enable()
    if records is None:
        return out, None
    events = (record for thread in records for record in thread)
    sizes = []
    for event in events:
        if event.kind() == "memory_alloc":
            sizes.append(event.cpu_memory_usage())
        elif event.kind() == "push" and event.name() == internals.PROFILE_MARK:
            sizes.append(0)
    return out, sizes


def workspace_of(sizes: Iterable[int]) -> Workspace:
    """Return the workspace of an operation.

    ``sizes``: Bytes of the operation's allocations (positive) and frees (negative), in order.
    """
    level = peak = 0
    for size in sizes:
        level += size
        peak = max(peak, level)
    return Workspace(peak, level)


def extrapolated(found: Sequence[list[int]], points: Sequence[int], length: int) -> list[int]:
    """Estimate an operation's allocations for one length of a dimension, from measurements at other lengths.

    The bytes of each allocation are assumed to follow a line (two measurements) or a parabola (three). If the
    measurements have different numbers of allocations, each measurement is first reduced to one allocation.

    Args:
        found: Bytes of the operation's allocations (positive) and frees (negative), measured at each of
            ``points``.
        points: Lengths of a dimension that were measured.
        length: Length for which the allocations are estimated.
    """
    if len(set(map(len, found))) > 1:
        found = [_as_one(sizes) for sizes in found]
    # Coefficients of Lagrange's polynomial through the measured points.
    parts = [
        prod((length - other) / (at - other) for other in points if other != at) for at in points
    ]
    return [
        round(sum(part * size for part, size in zip(parts, sizes, strict=True)))
        for sizes in zip(*found, strict=True)
    ]


def _as_one(sizes: list[int]) -> list[int]:
    workspace = workspace_of(sizes)
    return [workspace.peak, workspace.kept - workspace.peak]


def _started(start: Callable[[], Any]) -> bool:
    try:
        start()
    except RuntimeError:
        return False  # another profiler is on, which memlog must not stop
    return True


def _has_mask(values: Any) -> bool:
    return any(isinstance(value, Tensor) and value.dtype in _MASKS for value in values)


def _signature(value: Any) -> Any:
    if isinstance(value, Tensor):
        # The class matters, because an operation on fake tensors allocates nothing.
        return type(value), value.shape, value.stride(), value.dtype
    if isinstance(value, (list, tuple)):
        return tuple(map(_signature, value))
    return value if isinstance(value, _PLAIN) else type(value)

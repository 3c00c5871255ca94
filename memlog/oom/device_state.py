"""State of a CUDA device at a failed allocation: what is free, and who holds the rest.

The functions run in torch's observer of failed allocations. They allocate no memory on the device.

The search looks at variables of the program's running functions, outside the outermost call of a module:
containers of tensors, such as a list of batches, and graphs that earlier forward passes recorded.
"""

from __future__ import annotations

import os
from collections import Counter, deque
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from inspect import CO_OPTIMIZED
from types import FrameType
from typing import Any, NamedTuple

from memlog._internal.diagnostics import Diagnostics
from memlog._internal.inert_access import container_base, instance_dict, is_kind, tracked_objects
from memlog._internal.processes import rank_position
from memlog.events import DeviceProcess, DeviceState, GraphInUse, HeldTensors
from memlog.inputs.step_inputs import program_frames, variables_of
from memlog.probes.nvml import Nvml, ProcessUse
from memlog.probes.process import (
    allocator_settings,
    has_expandable_segments,
    segments_without_history,
)

_MOST_PROCESSES = 32
"""Maximum number of other processes in a state."""
SMALL_SEGMENT = 2 * 1024**2
"""Bytes of a segment of small blocks (c10/core/AllocatorConfig.h). Other segments are larger, and a request
of at most 1 MiB asks the driver for this size."""
_SHARED_POOL = (0, 0)
"""Identity of the pool in which the allocator holds all memory that is in no private pool."""
_FRACTION = "the part of the device that this process may use (`torch.cuda.set_per_process_memory_fraction`)"


_SHARED = "the host's memory, which the device shares"


class Limit(NamedTuple):
    """The tightest limit of a process on a device, in bytes."""

    size: int
    free: int
    """Bytes that the process could still take under this limit."""
    name: str


def tightest_limit(
    total: int, free: int, allowed: int, reserved: int | None, *, shared: bool = False
) -> Limit:
    """Return the limit that leaves the process the fewest bytes.

    Args:
        total: Bytes of the device.
        free: Free bytes of the device.
        allowed: Bytes of the device that torch allows the process; ``total`` if there is no such limit.
        reserved: Bytes that the process's allocator holds; ``None``: unknown.
        shared: True if the device uses the host's memory.
    """
    if allowed < total and reserved is not None and allowed - reserved < free:
        return Limit(allowed, max(allowed - reserved, 0), _FRACTION)
    return Limit(total, free, _SHARED if shared else "the device's memory")


def device_state(
    torch: Any,
    device: int,
    total: int,
    free: int,
    reserved: int | None,
    nvml: Nvml,
    diagnostics: Diagnostics,
    *,
    requested: int,
    allowed: int,
    shared: bool,
) -> DeviceState:
    """Return the state of a CUDA device. Figures that can't be read are ``None``.

    ``total`` and ``free`` are bytes of the device, and ``reserved`` those that this process's allocator
    holds (``None``: unknown). ``requested`` is the size of the failed request to the driver, on the current
    stream. ``allowed`` and ``shared``: see `tightest_limit`.
    """
    others: int | None = None
    processes: tuple[DeviceProcess, ...] = ()
    pools = _Pools()
    with diagnostics.contained("reading which processes use the device"):
        uuid = getattr(torch.cuda.get_device_properties(device), "uuid", None)
        listed = [] if uuid is None else nvml.processes(str(uuid))
        others, processes = _other_processes(listed)
    with diagnostics.contained("reading the allocator's segments"):
        stream = torch.cuda.current_stream(device).cuda_stream
        pools = _pools(segments_without_history(torch), device, stream, requested)
    return DeviceState(
        free=free,
        outside=None if reserved is None or shared else max(total - free - reserved, 0),
        others=others,
        processes=processes,
        in_pools=pools.private,
        unused_in_pools=pools.unused_private,
        of_graphs=pools.of_graphs,
        largest_unused=pools.largest_unused,
        unused_of_streams=pools.unused_of_streams,
        allowed=allowed if allowed < total else None,
        expandable=has_expandable_segments(allocator_settings(torch)),
        shares_host=shared,
    )


def _other_processes(found: Sequence[ProcessUse]) -> tuple[int | None, tuple[DeviceProcess, ...]]:
    """Return the bytes that other processes use, and the largest of these processes.

    The bytes are ``None`` if they are unknown. In a container, the driver may list processes by ids that
    belong to other processes here. This process's own id is then missing, and no process is named.
    """
    own = os.getpid()
    others = sorted(
        (process for process in found if process.pid != own),
        key=lambda process: -(process.used or 0),
    )
    if len(others) == len(found):
        return None, ()
    sizes = [process.used for process in others if process.used is not None]
    known = sum(sizes) if len(sizes) == len(others) else None
    return known, tuple(_named(process, own) for process in others[:_MOST_PROCESSES])


def _named(process: ProcessUse, own: int) -> DeviceProcess:
    import psutil  # noqa: PLC0415 - takes 10 ms

    try:
        details = psutil.Process(process.pid)
        is_child = any(parent.pid == own for parent in details.parents())
        is_rank = rank_position() is not None and details.ppid() == os.getppid()
        return DeviceProcess(process.pid, process.used, details.name(), is_child, is_rank)
    except psutil.Error:
        return DeviceProcess(process.pid, process.used)


class _Pools(NamedTuple):
    """Bytes in the allocator's pools; ``None``: unknown."""

    private: int | None = None
    unused_private: int | None = None
    of_graphs: bool = False
    largest_unused: int | None = None
    unused_of_streams: int | None = None


def _pools(
    segments: Sequence[Mapping[str, Any]] | None, device: int, stream: int, requested: int
) -> _Pools:
    if segments is None:
        return _Pools()
    private: list[Mapping[str, Any]] = []
    shared: list[Mapping[str, Any]] = []
    for segment in segments:
        if segment["device"] == device:
            pool = tuple(segment.get("segment_pool_id", _SHARED_POOL))
            (shared if pool == _SHARED_POOL else private).append(segment)
    kind = "small" if requested <= SMALL_SEGMENT else "large"
    # The allocator serves a request only from blocks of its stream and of its kind of segment.
    usable = (
        segment
        for segment in shared
        if segment["stream"] == stream and segment["segment_type"] == kind
    )
    unused = (
        block["size"]
        for segment in usable
        for block in segment["blocks"]
        if block["state"] == "inactive"
    )
    return _Pools(
        sum(segment["total_size"] for segment in private),
        sum(segment["total_size"] - segment["active_size"] for segment in private),
        # torch numbers the pools of captures in the first place of the identity, and those that the program
        # makes in the second.
        bool(private) and all(segment["segment_pool_id"][0] for segment in private),
        max(unused, default=0),
        sum(
            segment["total_size"] - segment["active_size"]
            for segment in shared
            if segment["stream"] != stream
        ),
    )


_MODULE_CALL = "_call_impl"
_FEWEST = 2
"""A container counts if it holds at least so many tensors."""
_FEWEST_ANYWHERE = 8
"""Tensors in no known container count if there are at least so many. A step's inputs are fewer."""
_FEWEST_USES = 3
"""Graphs count if they use most parameters at least so many times. One use is a step's own forward pass."""
_DEPTH = 6
_ITEMS = 10_000
_VALUES = 50_000
_NODES = 100_000
"""Maximum numbers of items of a container, of values, and of nodes of graphs to look at."""


def held_tensors(
    torch: Any, frames: Sequence[FrameType], device: int, left_out: Collection[int]
) -> HeldTensors | None:
    """Return the container with the most bytes of tensors on a device; ``None`` if there is none.

    ``left_out`` holds the addresses of tensors that do not count, such as weights. ``frames`` are the running
    functions, the outermost first.
    """
    holders: dict[int, HeldTensors] = {}
    variables = list(_outside(frames))
    left_out = {*left_out, *_optimizer_state(torch, variables)}
    for name, value in variables:
        if is_kind(value, torch.nn.Module) or is_kind(value, torch.optim.Optimizer):
            continue
        for path, container in _containers(name, value):
            if id(container) not in holders:
                sizes = sizes_of(
                    tensor
                    for tensor in _tensors(torch, container)
                    if is_on(tensor, device) and address(tensor) not in left_out
                )
                if len(sizes) >= _FEWEST:
                    holders[id(container)] = HeldTensors(path, len(sizes), sum(sizes.values()))
    largest = max(holders.values(), key=lambda holder: holder.size, default=None)
    anywhere = _anywhere(torch, frames, device, left_out)
    # A container has a name, so it is preferred unless it has far fewer bytes.
    if anywhere is not None and anywhere.size > 2 * (0 if largest is None else largest.size):
        return anywhere
    return largest


def _anywhere(
    torch: Any, frames: Sequence[FrameType], device: int, left_out: Collection[int]
) -> HeldTensors | None:
    """Return all tensors without gradients that Python's garbage collector knows; ``None`` if they are few.

    Such as the batches of a running generator, which no variable holds. Weights, gradients, optimizer state
    and the variables of the running modules do not count.
    """
    objects = [
        instance
        for instance in tracked_objects()
        if issubclass(type(instance), (torch.Tensor, torch.optim.Optimizer))
    ]
    state = [instance for instance in objects if issubclass(type(instance), torch.optim.Optimizer)]
    tensors = [
        instance
        for instance in objects
        if issubclass(type(instance), torch.Tensor) and is_on(instance, device)
    ]
    weights = [
        tensor for tensor in tensors if tensor.requires_grad or is_kind(tensor, torch.nn.Parameter)
    ]
    used = {*left_out, *map(address, weights)}
    # torch warns when `grad` of a tensor that is no leaf is read.
    used |= {
        address(weight.grad) for weight in weights if weight.is_leaf and weight.grad is not None
    }
    for optimizer in state:
        used |= set(map(address, _tensors(torch, _attributes(optimizer).get("state"))))
    inner = frames[_outermost_call(frames) :]
    for frame in inner:
        used |= {
            address(tensor) for _, value in variables_of(frame) for tensor in _tensors(torch, value)
        }
    held = sizes_of(tensor for tensor in tensors if address(tensor) not in used)
    if len(held) < _FEWEST_ANYWHERE:
        return None
    return HeldTensors(None, len(held), sum(held.values()))


def _optimizer_state(torch: Any, variables: Sequence[tuple[str, object]]) -> Iterator[int]:
    """Yield addresses of the state of optimizers in variables, and in attributes of their objects."""
    values = [value for _, value in variables]
    inside = (inner for value in values for inner in _attributes(value).values())
    for candidate in (*values, *inside):
        if is_kind(candidate, torch.optim.Optimizer):
            yield from map(address, _tensors(torch, _attributes(candidate).get("state")))


def kept_graph(torch: Any, frames: Sequence[FrameType]) -> GraphInUse | None:
    """Return the variable that keeps graphs of the most forward passes; ``None`` if none keeps several."""
    graphs: list[GraphInUse] = []
    for name, value in _outside(frames):
        roots = [tensor.grad_fn for tensor in _tensors(torch, value) if tensor.grad_fn is not None]
        uses = _uses(roots)
        if uses >= _FEWEST_USES:
            graphs.append(GraphInUse(name, uses))
    return max(graphs, key=lambda graph: graph.uses, default=None)


def _outside(frames: Sequence[FrameType]) -> Iterator[tuple[str, object]]:
    """Yield the variables of the program outside the outermost call of a module, the innermost first."""
    for frame in program_frames(reversed(frames[: _outermost_call(frames)])):
        yield from variables_of(frame)
        # A function also uses global variables. The variables of other code are global already.
        if frame.f_code.co_flags & CO_OPTIMIZED:
            names = frame.f_code.co_names
            yield from ((name, frame.f_globals[name]) for name in names if name in frame.f_globals)


def _outermost_call(frames: Sequence[FrameType]) -> int:
    """Return the index of the outermost call of a module; the number of frames if no module runs."""
    calls = (at for at, frame in enumerate(frames) if frame.f_code.co_name == _MODULE_CALL)
    return next(calls, len(frames))


def _containers(name: str, value: object) -> Iterator[tuple[str, object]]:
    """Yield a variable's container with its name, or those in attributes of the variable's object."""
    if _holds(value):
        yield name, value
        return
    for attribute, inner in _attributes(value).items():
        if _holds(inner):
            yield f"{name}.{attribute}", inner


def _attributes(value: object) -> dict[Any, Any]:
    """Return a copy of an object's attributes; empty if it has none of its own."""
    return dict((not isinstance(value, type) and instance_dict(value)) or {})


def _holds(value: object) -> bool:
    return container_base(value) is not None or is_kind(value, tuple)


def _tensors(torch: Any, value: object) -> Iterator[Any]:
    """Yield the tensors in a value: the value itself, or those in nested containers up to `_DEPTH`."""
    return tensors_in(torch, value, _items, depth=_DEPTH, most=_VALUES)


def _items(value: Any) -> list[object]:
    if is_kind(value, tuple):
        return list(tuple.__iter__(value))[:_ITEMS]
    base = container_base(value)
    if base is None or base is bytearray:
        return []
    return list(dict.values(value) if base is dict else base.__iter__(value))[:_ITEMS]  # type: ignore[attr-defined] # a container


def _uses(roots: Sequence[Any]) -> int:
    """Return how often graphs use a parameter: the median of the parameters, the lower of two.

    A layer that a model applies several times counts as often. Most layers of most models are applied once,
    so that the number is that of the forward passes.
    """
    seen = {id(root): root for root in roots}  # keeps the nodes, and so their identities
    waiting = deque(seen.values())
    edges: Counter[int] = Counter()
    while waiting and len(seen) < _NODES:
        for node, _ in waiting.popleft().next_functions:
            if node is None:
                continue
            if node.name().endswith("AccumulateGrad"):
                edges[id(node)] += 1
                seen[id(node)] = node
            elif id(node) not in seen:
                seen[id(node)] = node
                waiting.append(node)
    # The lower median.
    return sorted(edges.values())[(len(edges) - 1) // 2] if edges else 0


def tensors_in(
    torch: Any,
    value: object,
    inside: Callable[[object], Iterable[object]],
    *,
    depth: int,
    most: int,
) -> Iterator[Any]:
    """Yield the tensors in a value: the value itself, or those inside it at any level up to ``depth``.

    ``inside`` returns the values directly inside a value. At most ``most`` values are looked at, level by
    level.
    """
    waiting, looked_at = deque([(value, 0)]), 0
    while waiting and looked_at < most:
        current, level = waiting.popleft()
        looked_at += 1
        if is_kind(current, torch.Tensor):
            yield current
        elif level < depth:
            waiting += [(inner, level + 1) for inner in inside(current)]


def sizes_of(tensors: Iterable[Any]) -> dict[int, int]:
    """Return the bytes of the tensors' storages, by address. Tensors that share a storage count once."""
    return {address(tensor): size(tensor) for tensor in tensors}


def is_on(tensor: Any, device: int) -> bool:
    """Return True if a tensor is on the CUDA device with an index."""
    return bool(tensor.device.type == "cuda" and tensor.device.index == device)


def size(tensor: Any) -> int:
    """Return the bytes of a tensor's storage, which other tensors may share."""
    return int(_plain(tensor).untyped_storage().nbytes())


def address(tensor: Any) -> int:
    """Return the address of a tensor's storage."""
    return int(_plain(tensor).untyped_storage().data_ptr())


def _plain(tensor: Any) -> Any:
    """Return the part of a DTensor that is on this device; any other tensor itself."""
    return getattr(tensor, "_local_tensor", tensor)

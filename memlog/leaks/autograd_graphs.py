"""Storages that autograd graphs keep, and the tensors that keep the graphs.

The walk follows ``next_functions`` from all tensors that have a Python object. The walk calls no unpack
hooks, such as those of checkpointing and offloading, because unpack hooks are the program's code. So the walk
reads a node's saved tensors as ``_raw_saved_…``.
"""

from __future__ import annotations

import gc
import sys
from types import CodeType, FrameType, GetSetDescriptorType, ModuleType
from typing import Any, Final, NamedTuple

import torch

from memlog._internal.inert_access import bases, class_namespace, is_kind, own_method
from memlog.leaks.live_tensors import LiveTensors, tensor_storage
from memlog.leaks.time_budget import TimeBudget

_MAX_NODES: Final = 30_000
_MAX_PACKED: Final = 200
"""Maximum number of objects that one call of `_add_packed` visits."""
_STOPS: Final = (type, ModuleType, FrameType, CodeType)
NODE_BYTES: Final = 450
"""Approximate bytes of a graph's node without its saved tensors."""
_BLOCK: Final = 16
"""Approximate bytes that an allocator adds to each object."""


class KeptGraph(NamedTuple):
    """Storages that the graph of one tensor or node keeps.

    The watched iterations are the few training steps that `memlog.leaks.holder_search` watches.

    Attributes:
        holder: The tensor or node that keeps the graph.
        operation: Name of the graph's last node.
        storages: Bytes of each storage that nodes of the watched iterations have saved, by the storage's
            identity.
        nodes: Number of the graph's nodes that the watched iterations made.
        traceback_bytes: Bytes of the tracebacks that anomaly detection keeps with these nodes.
        sharers: Other tensors and nodes whose graphs have nodes in common with this graph, the newest first.
        spread: Part of the watched iterations from the graph's oldest node in them to the newest one.
    """

    holder: Any
    operation: str
    storages: dict[int, int]
    nodes: int
    traceback_bytes: int
    sharers: list[Any]
    spread: float


class GraphWalk:
    """Walk through autograd graphs. If several graphs share a node, only the first graph counts the node.

    Only nodes with sequence numbers from ``first_node`` up to, but not including, ``end_node`` are counted.
    Older nodes are not visited.
    """

    def __init__(self, first_node: int, end_node: int, budget: TimeBudget) -> None:
        self._first, self._end = first_node, end_node
        self._budget = budget
        self._visited: dict[int, tuple[Any, list[Any]]] = {}
        """Visited nodes by identity. The list is `KeptGraph.sharers` of the first graph that has the node."""
        self._saved_names: dict[int, tuple[str, ...]] = {}
        self._has_tracebacks = torch.is_anomaly_enabled()

    def graphs(self, tensors: LiveTensors) -> list[KeptGraph]:
        """Return the graphs that live tensors keep and that contain nodes of the watched iterations."""
        found = []
        with torch._C.DisableTorchFunction():
            for _, holder, node in tensors.roots:
                graph = KeptGraph(
                    holder, str(own_method(node, "name")()), *self._walk(node, holder)
                )
                if graph.nodes:
                    found.append(graph)
        return found

    def kept_by(self, node: Any) -> dict[int, int]:
        """Return the bytes of each storage that a graph keeps, by the storage's identity.

        ``node`` is the last node of the graph.
        """
        with torch._C.DisableTorchFunctionSubclass():
            return self._walk(node, node)[0]

    def _walk(self, root: Any, holder: Any) -> tuple[dict[int, int], int, int, list[Any], float]:
        sharers: list[Any] = []
        waiting, storages, nodes, traceback_bytes = [root], dict[int, int](), 0, 0
        oldest, newest = self._end, self._first
        while waiting:
            node = waiting.pop()
            known = self._visited.get(id(node))
            if known is not None:
                if known[1] is not sharers and (not known[1] or known[1][-1] is not holder):
                    known[1].append(holder)
                continue
            number = int(own_method(node, "_sequence_nr")())
            if number < self._first:
                continue
            if len(self._visited) >= _MAX_NODES or self._budget.spent:
                break
            self._visited[id(node)] = node, sharers
            if number < self._end:
                nodes += 1
                oldest, newest = min(oldest, number), max(newest, number)
                self._add_saved(node, storages)
                traceback_bytes += _traceback_bytes(node) if self._has_tracebacks else 0
            waiting += [inner for inner, _ in node.next_functions if inner is not None]
        spread = max(0, newest - oldest) / max(1, self._end - self._first)
        return storages, nodes, traceback_bytes, sharers, spread

    def _add_saved(self, node: Any, storages: dict[int, int]) -> None:
        kind = type(node)
        names = self._saved_names.get(id(kind))
        if names is None:
            names = self._saved_names[id(kind)] = saved_names(kind)
        for name in names:
            saved = saved_value(node, name)
            for one in saved if type(saved) in (tuple, list) else (saved,):
                self._add_one(one, storages)
        if is_kind(node, torch.autograd.function.FunctionCtx):
            _add_packed(gc.get_referents(node), storages)

    def _add_one(self, saved: Any, storages: dict[int, int]) -> None:
        hook = saved_value(saved, "unpack_hook")
        data = saved_value(saved, "data")
        if hook is not None:
            _add_packed([data, hook], storages)
        elif data is not None:
            _add_tensor(data, storages)


def _traceback_bytes(node: Any) -> int:
    """Return the bytes of the traceback that anomaly detection has stored with a node."""
    for base in bases(type(node)):
        found = class_namespace(base).get("metadata")
        if type(found) is GetSetDescriptorType:
            metadata = found.__get__(node)
            lines = metadata.get("traceback_")
            kept = [metadata, lines, *lines] if type(lines) is list else []
            return sum(map(sys.getsizeof, kept)) + _BLOCK * len(kept)
    return 0


def saved_value(owner: Any, name: str) -> Any:
    """Return an attribute of an autograd node; ``None`` if a backward pass freed it, or the node lacks it."""
    try:
        return getattr(owner, name, None)
    except RuntimeError:
        return None


def saved_names(kind: type) -> tuple[str, ...]:
    return tuple(
        name
        for base in bases(kind)
        for name in class_namespace(base)
        if name.startswith("_raw_saved_")
    )


def _add_packed(values: list[Any], storages: dict[int, int]) -> None:
    """Add the storages of the tensors to which ``values`` refer, directly or through other objects."""
    waiting, seen = list(values), dict[int, Any]()
    while waiting and len(seen) < _MAX_PACKED:
        value = waiting.pop()
        if id(value) in seen or any(is_kind(value, stop) for stop in _STOPS):
            continue
        seen[id(value)] = value
        if is_kind(value, torch.Tensor):
            _add_tensor(value, storages)
        elif not is_kind(value, torch.nn.Module):
            waiting += gc.get_referents(value)


def _add_tensor(tensor: Any, storages: dict[int, int]) -> None:
    storage = tensor_storage(tensor) if is_kind(tensor, torch.Tensor) else None
    if storage is not None:
        storages[storage._cdata] = storage.nbytes()

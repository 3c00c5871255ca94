"""Autograd graphs that are kept, or recorded and never used.

The walk follows ``next_functions`` from all tensors that have a Python object. The walk calls no unpack
hooks, such as those of checkpointing and offloading, because unpack hooks are the program's code. So the walk
reads a node's saved tensors as ``_raw_saved_…``.

A forward pass is an outermost call of a module in evaluation mode with gradients enabled. While the watch is
on, global hooks notice each forward pass. memlog adds a hook to the last graph node of each output of the
module and its submodules. A backward pass calls this hook. The hook is freed with the graph, so memlog keeps
no graph alive. From the hook, memlog knows whether a backward pass used a part of the graph, and whether the
graph is freed.

Forward passes that the same line of the program called are judged together. memlog reports the line if
several of the line's graphs were freed unused, and no graph was used. Models in training mode are not judged,
because rollouts, and generators with detached output, record unused graphs on purpose.
"""

from __future__ import annotations

import gc
import sys
import threading
import time
import weakref
from dataclasses import dataclass, field
from statistics import median
from types import CodeType, FrameType, GetSetDescriptorType, ModuleType
from typing import Any, Final, NamedTuple

import torch
from torch.nn.modules.module import (
    register_module_forward_hook,
    register_module_forward_pre_hook,
)

from memlog._internal.diagnostics import Diagnostics
from memlog._internal.inert_access import (
    bases,
    class_namespace,
    instance_dict,
    is_kind,
    own_method,
    shown,
    type_name,
)
from memlog._internal.terminal import MIB, format_bytes
from memlog.events import Finding, now_us
from memlog.leaks.live_tensors import LiveTensors, storage_of, tensor_storage
from memlog.leaks.process_objects import TimeBudget
from memlog.leaks.watched_storages import plain_tensors
from memlog.torchside import internals
from memlog.torchside.tensors import DisableTorchFunction, DisableTorchFunctionSubclass, TensorBase
from memlog.tracer.function_patch import COMPILE_WARNING_FILTER
from memlog.tracer.module_stack import CallingLines

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
        kept = []
        with DisableTorchFunction():
            for _, holder, node in tensors.roots:
                graph = KeptGraph(
                    holder, str(own_method(node, "name")()), *self._walk(node, holder)
                )
                if graph.nodes:
                    kept.append(graph)
        return kept

    def kept_by(self, node: Any) -> dict[int, int]:
        """Return the bytes of each storage that a graph keeps, by the storage's identity.

        ``node`` is the last node of the graph.
        """
        with DisableTorchFunctionSubclass():
            return self._walk(node, node)[0]

    def _walk(self, root: Any, holder: Any) -> tuple[dict[int, int], int, int, list[Any], float]:
        sharers: list[Any] = []
        waiting, storages, nodes, traceback_bytes = [root], dict[int, int](), 0, 0
        oldest, newest = self._end, self._first
        while waiting:
            node = waiting.pop()
            known = self._visited.get(id(node))
            if known is not None:
                # Several ways can lead from a holder to shared nodes. It is added only once.
                if known[1] is not sharers and (not known[1] or known[1][-1] is not holder):
                    known[1].append(holder)
                continue
            number = int(own_method(node, "_sequence_nr")())
            # The inputs of an operation were made before it. So the nodes behind this one are older, too.
            if number < self._first:
                continue
            if len(self._visited) >= _MAX_NODES or self._budget.spent:
                break
            # The node's object is kept. Otherwise torch makes new ones, whose identities can repeat.
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
            for variable in saved if type(saved) in (tuple, list) else (saved,):
                self._add_one(variable, storages)
        # The node of a `torch.autograd.Function` is its `ctx`, which can have tensors as attributes, too.
        if is_kind(node, torch.autograd.function.FunctionCtx):
            _add_packed(gc.get_referents(node), storages)

    def _add_one(self, saved: Any, storages: dict[int, int]) -> None:
        hook = saved_value(saved, "unpack_hook")
        data = saved_value(saved, "data")
        if hook is not None:
            # `data` is what the pack hook returned. The unpack hook can hold tensors, too.
            _add_packed([data, hook], storages)
        elif data is not None:
            _add_tensor(data, storages)


def _traceback_bytes(node: Any) -> int:
    """Return the bytes of the traceback that anomaly detection has stored with a node."""
    for base in bases(type(node)):
        descriptor = class_namespace(base).get("metadata")
        if type(descriptor) is GetSetDescriptorType:
            metadata = descriptor.__get__(node)
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
        # A hook can refer to the model, whose parameters the graph does not keep alive alone.
        elif not is_kind(value, torch.nn.Module):
            waiting += gc.get_referents(value)


def _add_tensor(tensor: Any, storages: dict[int, int]) -> None:
    storage = tensor_storage(tensor) if is_kind(tensor, torch.Tensor) else None
    if storage is not None:
        storages[storage._cdata] = storage.nbytes()


_FEWEST: Final = 3
"""Minimum number of graphs that were freed unused. A line of the program with fewer is not reported."""
_LEAST_BYTES: Final = 4 * MIB
"""Minimum median size of a line's graphs, in bytes. If it is smaller, the line is not reported."""
_MEASURED: Final = 5
"""Maximum number of measured graphs for each line of the program."""
_SECONDS: Final = 0.1
"""Maximum processor seconds for measuring one graph."""
_MAX_PENDING: Final = 256
_MAX_MARKS: Final = 2000
"""Maximum number of nodes of one forward pass's graph that get a hook."""
_MAX_LINES: Final = 64
_CALL_SECONDS: Final = 3e-6
"""Approximate seconds that the hooks take for each call of a module."""
_SHARE: Final = 0.0025
"""Fraction of the run's time. If the hooks take more time than this fraction plus `_ALLOWANCE`, memlog
removes them for some steps."""
_ALLOWANCE: Final = 0.02
"""Seconds that the hooks may take in addition to the fraction `_SHARE` of the run's time."""


@dataclass
class _Line:
    """Forward passes that one line of the program runs, through modules of one class."""

    text: str
    module: str
    unused: int = 0
    used: bool = False
    sizes: list[int] = field(default_factory=list)


class _Mark:
    """Hook on the nodes of one pass's graph. The hook is freed with the graph."""

    __slots__ = ("__weakref__", "line")

    def __init__(self, line: _Line) -> None:
        self.line = line

    def __call__(self, _gradients: Any) -> None:
        self.line.used = True


@dataclass
class _Pass:
    """Outermost call of a module in evaluation mode, while the call runs."""

    module: weakref.ref[Any]
    inputs: set[int]
    mark: _Mark
    first_node: int
    depth: int = 1
    marks: int = 0


class UnusedGraphs:
    """Watch over forward passes on the thread that steps the optimizer."""

    def __init__(self, diagnostics: Diagnostics) -> None:
        self._diagnostics = diagnostics
        self.finding: Finding | None = None
        self._thread = threading.get_ident()
        self._begun = time.monotonic()
        self._spent = self._newest = 0.0
        self._calls = 0
        self._handles: list[Any] = []
        self._caller = CallingLines()
        self._lines: dict[tuple[str, str], _Line] = {}
        self._pending: list[tuple[weakref.ref[_Mark], _Line]] = []
        self._pass: _Pass | None = None

    def step_ended(self, step: int) -> None:
        """Judge the passes so far, and decide whether to watch until the next step's end."""
        self._pass = None
        if self._handles:
            self._newest = self._calls * _CALL_SECONDS
            self._spent += self._newest
            self._calls = 0
        self.judge(step)
        # With hooks, the next step is expected to take as much as the newest one (`_newest`).
        allowed = _ALLOWANCE + _SHARE * (time.monotonic() - self._begun)
        compiles = internals.compiler_in_use()
        if self.finding is not None or compiles or self._spent + self._newest > allowed:
            self.stop()
        elif not self._handles:
            self._begin()

    def judge(self, step: int) -> None:
        """Check which graphs were freed. Set `finding` if a line's graphs were never used."""
        left = []
        for reference, line in self._pending:
            # A line with a used graph is never reported, so its other graphs need no check.
            if line.used:
                continue
            if reference() is None:
                line.unused += 1
            else:
                left.append((reference, line))
        self._pending = left
        for line in self._lines.values():
            if self.finding is None and line.unused >= _FEWEST and not line.used:
                size = median(line.sizes) if line.sizes else 0
                if size >= _LEAST_BYTES:
                    self.finding = _finding(line, int(size), step)

    def stop(self) -> None:
        """Remove the hooks. A second call is harmless."""
        if self._handles:
            while self._handles:
                self._handles.pop().remove()
            COMPILE_WARNING_FILTER.remove(self)
        self._pass = None

    def _begin(self) -> None:
        COMPILE_WARNING_FILTER.add(self)
        self._handles.append(register_module_forward_pre_hook(self._module_begins))
        # `always_call`: also if `forward` raises. Otherwise the pass would last until the step ends.
        self._handles.append(register_module_forward_hook(self._module_ends, always_call=True))

    def _module_begins(self, module: Any, args: Any) -> None:
        self._calls += 1
        if internals.compiler_in_use():
            # Remove the hooks before this module is compiled. Removing them later would compile it again.
            self.stop()
            return
        running = self._pass
        if running is not None:
            if running.module() is module and threading.get_ident() == self._thread:
                # A model can call itself within its forward pass. Only the outermost call ends the pass.
                running.depth += 1
            return
        if vars(module).get("training") is not False or not torch.is_grad_enabled():
            return
        with self._diagnostics.contained("noticing an evaluation"):
            self._pass_begins(module, args)

    def _pass_begins(self, module: Any, args: Any) -> None:
        if threading.get_ident() != self._thread or not _is_plain():
            return
        number = internals.next_sequence_number()
        if number is None or len(self._pending) >= _MAX_PENDING:
            return
        place = self._caller.current_line()
        text = self._caller.lines[place - 1] if place else ""
        key = text, type_name(module)
        if key not in self._lines and len(self._lines) >= _MAX_LINES:
            return
        line = self._lines.setdefault(key, _Line(*key))
        if not line.used:
            inputs = {storage_of(tensor) for tensor in plain_tensors(args)}
            self._pass = _Pass(weakref.ref(module), inputs, _Mark(line), number)

    def _module_ends(self, module: Any, _args: Any, output: Any) -> None:
        running = self._pass
        if running is None or threading.get_ident() != self._thread:
            return
        with self._diagnostics.contained("noticing the end of an evaluation"):
            if torch.compiler.is_compiling() or internals.tracing_graph():
                return
            nodes = _mark(output, running)
            if running.module() is not module:
                return
            running.depth -= 1
            if not running.depth:
                self._pass = None
                if running.marks:
                    self._pass_ended(running, nodes, module)

    def _pass_ended(self, running: _Pass, nodes: list[Any], module: Any) -> None:
        line = running.mark.line
        self._pending.append((weakref.ref(running.mark), line))
        if len(line.sizes) < _MEASURED:
            began = time.perf_counter()
            line.sizes.append(_size_of(nodes, running, module))
            self._spent += time.perf_counter() - began


def _is_plain() -> bool:
    """Return False during a backward pass, and while torch compiles, traces or transforms functions."""
    return not (
        torch.compiler.is_compiling()
        or internals.tracing_graph()
        or internals.backward_task() != internals.NO_TASK
        or internals.in_functorch_transform()
    )


def _mark(output: Any, running: _Pass) -> list[Any]:
    """Add the pass's hook to the last graph node of each output of a module, and return these nodes.

    Nodes that were made before this pass are left out.
    """
    nodes = []
    with DisableTorchFunctionSubclass():
        for tensor in plain_tensors(output):
            node = TensorBase.grad_fn.__get__(tensor)
            number = None if node is None else internals.sequence_number(node)
            if number is None or number < running.first_node:
                continue
            nodes.append(node)
            if running.marks < _MAX_MARKS:
                running.marks += 1
                node.register_prehook(running.mark)
    return nodes


def _size_of(nodes: list[Any], running: _Pass, module: Any) -> int:
    """Return the bytes that a pass's graphs keep, without the module's parameters, buffers and inputs.

    ``nodes`` contains the last nodes of the graphs.
    """
    end = internals.next_sequence_number()
    if end is None:
        return 0
    budget = TimeBudget(_SECONDS)
    with budget.running():
        walk = GraphWalk(running.first_node, end, budget)
        kept = {key: size for node in nodes for key, size in walk.kept_by(node).items()}
        for key in running.inputs | _own_storages(module):
            kept.pop(key, None)
    return sum(kept.values())


def _own_storages(module: Any) -> set[int]:
    """Return the identities of the storages of all parameters and buffers of a module and its submodules."""
    storages: set[int] = set()
    waiting, seen = [module], set[int]()
    while waiting:
        # The dictionaries are read, because `parameters()` can be a method of the program.
        attributes = instance_dict(waiting.pop()) or {}
        if id(attributes) in seen:
            continue
        seen.add(id(attributes))
        for registry in ("_parameters", "_buffers"):
            values = attributes.get(registry)
            if type(values) is dict:
                storages.update(
                    storage_of(tensor)
                    for tensor in values.values()
                    if is_kind(tensor, torch.Tensor)
                )
        inner = attributes.get("_modules")
        if type(inner) is dict:
            waiting += [submodule for submodule in inner.values() if submodule is not None]
    return storages


def _finding(line: _Line, size: int, step: int) -> Finding:
    place, _, _called = line.text.partition(": ")
    where, _, function = place.partition(" in ")
    by = f"`{shown(function)}()` ({where})" if function else where or "The program"
    return Finding(
        time_us=now_us(),
        step=step,
        kind="forward_without_backward",
        title=f"{by} calls a {line.module} in evaluation mode and records graphs that no backward pass uses: "
        f"each takes {format_bytes(size)} until its output is freed",
        where=where or None,
        since_step=None,
        rate=None,
        forecast=None,
        limit=None,
        evidence=(
            f"{line.unused} graphs of this line were freed and no backward pass had used any",
            f"a graph of it kept {format_bytes(size)} of tensors besides parameters",
        ),
        confidence="high",
        remedy="Run the evaluation under `torch.no_grad()` or `torch.inference_mode()`: `model.eval()` alone "
        "still records graphs.",
    )

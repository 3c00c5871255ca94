"""Evaluation without ``no_grad``: forward passes that record graphs that no backward pass uses.

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

import threading
import time
import weakref
from dataclasses import dataclass, field
from statistics import median
from typing import Any, Final

import torch
from torch.nn.modules.module import (
    register_module_forward_hook,
    register_module_forward_pre_hook,
)

from memlog._internal.diagnostics import Diagnostics
from memlog._internal.inert_access import instance_dict, is_kind, shown, type_name
from memlog._internal.units import MIB, format_bytes
from memlog.events import Finding, now_us
from memlog.leaks.autograd_graphs import GraphWalk
from memlog.leaks.live_tensors import storage_of
from memlog.leaks.time_budget import TimeBudget
from memlog.leaks.watched_storages import plain_tensors
from memlog.tracer import torch_private
from memlog.tracer.attribution.calling_lines import CallingLines
from memlog.tracer.hooks.warning_filter import COMPILE_WARNING_FILTER

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
_base: Any = torch._C.TensorBase


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
        allowed = _ALLOWANCE + _SHARE * (time.monotonic() - self._begun)
        compiles = torch_private.compiler_in_use()
        if self.finding is not None or compiles or self._spent + self._newest > allowed:
            self.stop()
        elif not self._handles:
            self._begin()

    def judge(self, step: int) -> None:
        """Check which graphs were freed. Set `finding` if a line's graphs were never used."""
        left = []
        for reference, line in self._pending:
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
        self._handles.append(register_module_forward_hook(self._module_ends, always_call=True))

    def _module_begins(self, module: Any, args: Any) -> None:
        self._calls += 1
        if torch_private.compiler_in_use():
            # Remove the hooks before this module is compiled. Removing them later would compile it again.
            self.stop()
            return
        running = self._pass
        if running is not None:
            if running.module() is module and threading.get_ident() == self._thread:
                running.depth += 1
            return
        if vars(module).get("training") is not False or not torch.is_grad_enabled():
            return
        with self._diagnostics.contained("noticing an evaluation"):
            self._pass_begins(module, args)

    def _pass_begins(self, module: Any, args: Any) -> None:
        if threading.get_ident() != self._thread or not _is_plain():
            return
        number = torch_private.next_sequence_number()
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
            if torch.compiler.is_compiling() or torch_private.tracing_graph():
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
        or torch_private.tracing_graph()
        or torch_private.backward_task() != torch_private.NO_TASK
        or torch_private.in_functorch_transform()
    )


def _mark(output: Any, running: _Pass) -> list[Any]:
    """Add the pass's hook to the last graph node of each output of a module, and return these nodes.

    Nodes that were made before this pass are left out.
    """
    nodes = []
    with torch._C.DisableTorchFunctionSubclass():
        for tensor in plain_tensors(output):
            node = _base.grad_fn.__get__(tensor)
            number = None if node is None else torch_private.sequence_number(node)
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
    end = torch_private.next_sequence_number()
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
    found: set[int] = set()
    waiting, seen = [module], set[int]()
    while waiting:
        attributes = instance_dict(waiting.pop()) or {}
        if id(attributes) in seen:
            continue
        seen.add(id(attributes))
        for registry in ("_parameters", "_buffers"):
            values = attributes.get(registry)
            if type(values) is dict:
                found.update(
                    storage_of(one) for one in values.values() if is_kind(one, torch.Tensor)
                )
        inner = attributes.get("_modules")
        if type(inner) is dict:
            waiting += [one for one in inner.values() if one is not None]
    return found


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

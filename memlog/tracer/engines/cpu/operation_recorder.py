"""Recording of the operations that the dispatch mode sees."""

from __future__ import annotations

from collections import Counter
from typing import Any, Final

import torch
from torch import Tensor

from memlog.trace.encoding import BACKWARD, FORWARD, OUTSIDE, WORKSPACE
from memlog.trace.storage_uses import UNKNOWN_TYPE
from memlog.tracer.attribution.calling_lines import CallingLines
from memlog.tracer.attribution.module_stack import ModuleStack, ThreadState
from memlog.tracer.engines.cpu import dispatch_mode, library_memory, op_workspace
from memlog.tracer.engines.cpu.autocast_types import AutocastTypes
from memlog.tracer.engines.cpu.dispatch_copies import ModeCopies
from memlog.tracer.engines.cpu.live_storages import LiveStorages
from memlog.tracer.engines.cpu.model_tensors import ModelTensors
from memlog.tracer.engines.cpu.op_workspace import Workspace
from memlog.tracer.engines.cpu.storage_events import AllocationOwner
from memlog.tracer.event_log import EventLog
from memlog.tracer.tensor_storages import changed, storages_in, tensors_in

_COLLECTIVES: Final = "c10d"
"""Namespace of collectives that return their arguments, although the schemas do not say so."""
_LIFT_FRESH = torch.ops.aten.lift_fresh.default


class OperationRecorder:
    """Observer of a dispatch mode. It tracks the storages of results, and the workspaces of operations.

    Attributes:
        altered: Bytes allocated by each derivative that torch computes in another way during tracing.
        lines: Lines of the program that called operations outside all modules.
        unmeasured: Number of calls of each operation whose workspace could not be measured.
    """

    def __init__(
        self,
        log: EventLog,
        live_storages: LiveStorages,
        module_stack: ModuleStack,
        model_tensors: ModelTensors,
        *,
        fakes: bool,
        types: bool,
    ) -> None:
        self._log = log
        self._live_storages = live_storages
        self._module_stack = module_stack
        self._model_tensors = model_tensors
        self._fakes = fakes
        self._calling_lines = CallingLines()
        self._copies = ModeCopies(live_storages)
        self._autocast_types = AutocastTypes(live_storages) if types else None
        self.altered = self._copies.altered
        self.lines = self._calling_lines.lines
        self.unmeasured: Counter[str] = Counter()

    def owner(self, thread_state: ThreadState) -> AllocationOwner:
        """Return the layer, phase and thread of the current operation. Also set the line of new storages.

        Outside all modules, the line is the program's line that calls the operation. In the backward pass,
        the line is the one that called the forward operation, if known. Within a module, the line is 0.
        """
        layer, phase = self._module_stack.owner(thread_state)
        line = 0
        if layer == OUTSIDE:
            line = thread_state.line if phase == BACKWARD else 0
            line = line or self._calling_lines.current_line()
            if phase == FORWARD:
                self._module_stack.mark_line(line, thread_state)
        self._live_storages.events.line = line
        return AllocationOwner(layer, phase, thread_state.number)

    def before_change(self, values: Any) -> None:
        """Track the storages of an operation's arguments, because the operation may change them."""
        if self._module_stack.thread_state(join=True) is not None:
            for tensor in tensors_in(values):
                self._live_storages.track_existing(tensor)

    def operation(
        self, func: Any, kind: int, args: Any, out: Any, inside: Workspace | None
    ) -> None:
        thread_state = self._module_stack.thread_state(join=True)
        if thread_state is None:
            return
        result = kind & dispatch_mode.RESULT
        if getattr(func, "namespace", None) == _COLLECTIVES:
            self._live_storages.communicated(tensors_in(args), self._model_tensors.bucket_sizes)
            result = dispatch_mode.NOTHING
        if result == dispatch_mode.DETACHED:
            self._model_tensors.add_detached(out)
            return
        if result == dispatch_mode.COPIED:
            new = changed(out, storages_in(args))
            result = dispatch_mode.NEW if new else dispatch_mode.NOTHING
            out = new[0] if len(new) == 1 else new
        owner = self.owner(thread_state)
        made = UNKNOWN_TYPE
        before, *between, after = _around_results(inside)
        blocks = self._live_storages.add_workspace(before, owner, made, first=True)
        if result == dispatch_mode.NEW:
            if func is not _LIFT_FRESH or not self._live_storages.is_foreign(out.untyped_storage()):
                if inside is not None and inside.order:
                    out = tuple(out[at] for at in inside.order)
                for sizes, result_tensor in zip(between, tensors_in(out), strict=False):
                    self._live_storages.track(result_tensor, owner)
                    blocks = self._live_storages.add_workspace(sizes, owner, made, blocks)
                made = self._track_results(func, args, out, owner, thread_state)
        elif result:
            self._live_storages.track_changed(
                tensors_in(out), owner, written=bool(result & dispatch_mode.WRITTEN)
            )
        self._add_kept(func, owner)
        self._live_storages.add_workspace(after, owner, made, blocks)
        self._count_unmeasured(func, kind, inside)
        self._log.fold_when_full()

    def _add_kept(self, func: Any, owner: AllocationOwner) -> None:
        """Track the memory that a library takes at the operation and keeps."""
        for tensor in library_memory.taken_by(func):
            self._live_storages.classify(tensor, OUTSIDE, WORKSPACE, owner.phase)

    def _count_unmeasured(self, func: Any, kind: int, inside: Workspace | None) -> None:
        measures = kind > dispatch_mode.RESULT and (
            not self._fakes or op_workspace.measures_fakes()
        )
        if measures and (inside is None or not inside.complete):
            self.unmeasured[str(func)] += 1

    def _track_results(
        self, func: Any, args: Any, out: Any, owner: AllocationOwner, thread_state: ThreadState
    ) -> int:
        """Track the results of an operation; return their type under autocast."""
        before = self._live_storages.serial
        instead = self._copies.replaced(func, args, out, owner.phase, thread_state)
        for tensor in (out,) if isinstance(out, Tensor) else tensors_in(out):
            self._live_storages.track(tensor, owner, instead)
        if self._autocast_types is None:
            return UNKNOWN_TYPE
        return self._autocast_types.operation(func, args, out, owner.layer, owner.phase, before)

    def add_result(self, tensor: Tensor) -> None:
        """Record the result of a derivative that torch computed without the dispatch mode."""
        thread_state = self._module_stack.thread_state(join=True)
        if thread_state is not None:
            self._live_storages.track(tensor, self.owner(thread_state))


def _around_results(inside: Workspace | None) -> list[tuple[int, ...]]:
    """Return a workspace's allocations and frees before the results, between them, and after them."""
    if inside is None:
        return [(), ()]
    if inside.blocks is None:
        size = inside.peak - inside.kept
        return [(), ((size, -size) if size > 0 else ())]
    if op_workspace.RESULTS not in inside.blocks:
        return [(), inside.blocks]
    parts, begin = [], 0
    for at, size in enumerate(inside.blocks):
        if size == op_workspace.RESULTS:
            parts.append(inside.blocks[begin:at])
            begin = at + 1
    return [*parts, inside.blocks[begin:]]

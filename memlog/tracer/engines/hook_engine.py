"""Base class of the engines that follow modules and the backward pass with hooks only."""

from __future__ import annotations

from typing import Any

from memlog._internal.diagnostics import Diagnostics
from memlog.trace.encoding import BACKWARD
from memlog.tracer.attribution.module_names import ModuleNames
from memlog.tracer.attribution.module_stack import ModuleStack, ThreadState
from memlog.tracer.event_log import EventLog
from memlog.tracer.hooks.autograd_hooks import BackwardMarks
from memlog.tracer.hooks.module_hooks import Hooks


class HookEngine:
    """Base class of engines that trace every thread that calls the model's modules."""

    def __init__(self, log: EventLog, names: ModuleNames, diagnostics: Diagnostics) -> None:
        self._log = log
        self._names = names
        self._hooks = Hooks(self, diagnostics, log.took)
        self._module_stack = ModuleStack(names, self._emit, all_threads=True)
        self._backward = BackwardMarks(self._backward_reaches, diagnostics)
        self._stopped = False

    def leave(self) -> bool:
        """Return True if `stop` was called. Nothing of a stopped engine is left in torch."""
        return self._stopped

    def stop_recording(self) -> None:
        self._module_stack.closed = True

    def module_begins(self, module: Any, args: Any) -> None:
        thread_state = self._module_stack.thread_state()
        surrounding = thread_state.stack[-1][0] if thread_state is not None else 0
        if self._module_stack.module_begins(module) is not None:
            self._backward.mark(args, surrounding)

    def module_ends(self, module: Any, output: Any) -> None:
        layer = self._module_stack.module_ends(module)
        if layer is not None:
            self._backward.mark(output, layer)

    def optimizer_begins(self, optimizer: Any) -> None:
        self._module_stack.optimizer_begins(optimizer)

    def optimizer_ends(self, optimizer: Any) -> None:
        self._module_stack.optimizer_ends(optimizer)

    def _end(self) -> None:
        self._hooks.remove()
        self._module_stack.close()
        self._backward.close()

    def _backward_reaches(self, layer: int) -> None:
        thread_state = self._module_stack.thread_state(join=True)
        if thread_state is not None:
            self._module_stack.set_phase(thread_state, layer, BACKWARD)

    def _emit(self, kind: int, layer: int, phase: int, thread_state: ThreadState) -> None:
        raise NotImplementedError

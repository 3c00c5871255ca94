"""Current module and phase of each thread."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any, Final

import torch

from memlog.trace.encoding import (
    BACKWARD,
    ENTER,
    EXIT,
    FORWARD,
    OPTIMIZER,
    OUTSIDE,
    PHASE_CHANGE,
    RECOMPUTE,
)
from memlog.tracer import torch_private
from memlog.tracer.attribution.autograd_sequence import GraphOwners
from memlog.tracer.attribution.module_names import ModuleNames

_MAX_THREADS = 256
"""Maximum number of threads in a window, because the thread is one byte of an event. Operations of further
threads are not recorded."""
_MAX_STEPS = 1000
"""Maximum number of optimizer steps in a window for which the optimizer's name is kept."""

NO_INPUTS: Final = (-1, 0)
"""Value of `ThreadState.inputs` for a module that is called without a tensor as positional argument."""


class ThreadState:
    """Current module and phase of one thread.

    Attributes:
        number: Number of the thread; 0 is the one that began the window.
        stack: Running modules, the innermost last: layer, number of the backward pass in which the module
            began, and identity of the module. The first entry stands for "outside all modules".
        optimizing: Identity of the optimizer whose step runs.
        outside_owner: Layer and phase that operations outside ``forward`` count for.
        backward_layer: Layer whose forward operation was differentiated last.
        line: Number of the program's line whose forward operation was differentiated last; 0: unknown.
        node: Number of the autograd node whose operation ran last; ``None`` if it accumulates gradients.
        inputs: The two largest inputs of the module that is about to begin. The CPU engine gives the serials
            of their storages, other engines the addresses. The module's ENTER event contains both.
    """

    def __init__(self, number: int) -> None:
        self.number = number
        self.stack: list[tuple[int, int, int]] = [(OUTSIDE, torch_private.NO_TASK, 0)]
        self.optimizing: int | None = None
        self.outside_owner = (OUTSIDE, FORWARD)
        self.backward_layer = OUTSIDE
        self.line = 0
        self.node: int | None = None
        self.inputs = NO_INPUTS


class ModuleStack:
    """Running modules, backward passes and optimizers of the threads that take part in a window.

    Args:
        emit: Called when a module begins or ends, or a phase changes. It gets the kind of the event, the
            layer, the phase and the state of the thread.
        all_threads: True if all threads that call the model's modules take part. False if only the thread
            that began the window takes part, with the threads that run its backward pass.
    """

    def __init__(
        self,
        names: ModuleNames,
        emit: Callable[[int, int, int, ThreadState], None],
        *,
        all_threads: bool,
    ) -> None:
        self._names = names
        self._emit_event = emit
        self._all_threads = all_threads
        self._thread_states: dict[int, ThreadState] = {}
        self._graph = GraphOwners()
        """Owners of the operations in the graph of the thread that began the window."""
        self.closed = False

    def begin(self) -> None:
        """Begin the window on this thread."""
        self._thread_states[threading.get_ident()] = ThreadState(0)
        self._graph.mark(OUTSIDE)

    def close(self) -> None:
        """Close the window and end the open phases."""
        if not self.closed:
            for thread_state in list(self._thread_states.values()):
                self.set_phase(thread_state, OUTSIDE, FORWARD)
            self.closed = True

    def thread_state(self, *, join: bool = False) -> ThreadState | None:
        """Return this thread's state; ``None`` if it takes no part in the window.

        With ``join``, the thread takes part from now on.
        """
        if self.closed:
            return None
        identity = threading.get_ident()
        thread_state = self._thread_states.get(identity)
        if thread_state is None and join and len(self._thread_states) < _MAX_THREADS:
            thread_state = self._thread_states[identity] = ThreadState(len(self._thread_states))
        return thread_state

    def module_begins(self, module: Any) -> ThreadState | None:
        """Record the begin of a module's ``forward``; return this thread's state if it takes part."""
        thread_state = self.thread_state(join=self._all_threads and self._names.knows(module))
        if thread_state is None:
            return None
        task = torch_private.backward_task()
        if task == torch_private.NO_TASK and thread_state.outside_owner[1] == BACKWARD:
            self._backward_ends(thread_state, thread_state.stack[-1][0])
            self.set_phase(thread_state, OUTSIDE, FORWARD)
        layer = self._names.layer_of(module, thread_state.stack[-1][0])
        thread_state.stack.append((layer, task, id(module)))
        if thread_state.number == 0:
            self._graph.mark(layer)
        self._emit_event(ENTER, layer, _phase_begun_in(task), thread_state)
        return thread_state

    def module_ends(self, module: Any) -> int | None:
        """Record the end of a module's ``forward``, and return the module's layer.

        Modules that began inside this ``forward`` and have not ended are recorded as ended, too. Return
        ``None`` if the begin of the module was not recorded. torch calls the end hook even if another hook
        raised before memlog's begin hook ran.
        """
        thread_state, identity, ended = self.thread_state(), id(module), 0
        if thread_state is None or all(entry[2] != identity for entry in thread_state.stack):
            return None
        while ended != identity:
            layer, task, ended = thread_state.stack.pop()
            self._emit_event(EXIT, layer, _phase_begun_in(task), thread_state)
        if thread_state.number == 0:
            self._graph.mark(thread_state.stack[-1][0])
        return layer

    def optimizer_begins(self, optimizer: Any) -> None:
        """Record the begin of an optimizer's step. Of nested steps, the outermost counts."""
        thread_state = self.thread_state()
        if thread_state is not None and thread_state.optimizing is None:
            thread_state.optimizing = id(optimizer)
            if len(thread_state.stack) == 1:
                self.set_phase(thread_state, OUTSIDE, OPTIMIZER)
                if len(self._names.optimizers) < _MAX_STEPS:
                    self._names.optimizers.append(type(optimizer).__name__)

    def optimizer_ends(self, optimizer: Any) -> None:
        """Record the end of an optimizer's step."""
        thread_state = self.thread_state()
        if thread_state is not None and thread_state.optimizing == id(optimizer):
            thread_state.optimizing = None
            self.set_phase(thread_state, OUTSIDE, FORWARD)

    def set_phase(self, thread_state: ThreadState, layer: int, phase: int) -> None:
        """Set the layer and phase that later operations outside ``forward`` count for."""
        if thread_state.outside_owner != (layer, phase):
            thread_state.outside_owner = (layer, phase)
            self._emit_event(PHASE_CHANGE, layer, phase, thread_state)

    def owner(self, thread_state: ThreadState) -> tuple[int, int]:
        """Return layer and phase of this thread's current operation."""
        layer, began_in, _ = thread_state.stack[-1]
        task = torch_private.backward_task()
        if task == torch_private.NO_TASK:
            backward = thread_state.outside_owner[1] == BACKWARD
            if backward:
                self._backward_ends(thread_state, layer)
            if thread_state.optimizing is not None and len(thread_state.stack) == 1:
                self.set_phase(thread_state, OUTSIDE, OPTIMIZER)
                return OUTSIDE, OPTIMIZER
            if backward:
                self.set_phase(thread_state, OUTSIDE, FORWARD)
            return layer, FORWARD
        # A module that began in this backward pass runs its forward again. A module that began outside it
        # calls backward() inside its own forward.
        if began_in == task:
            return layer, RECOMPUTE
        layer = self._backward_layer(thread_state)
        self.set_phase(thread_state, layer, BACKWARD)
        return layer, BACKWARD

    def _backward_layer(self, thread_state: ThreadState) -> int:
        """Return the layer whose forward pass made the operation that is differentiated now.

        Nodes that accumulate gradients have no number. They belong to the layer of the node before them.
        """
        node = torch_private.current_node()
        number = torch_private.sequence_number(node) if node is not None else None
        thread_state.node = number
        if number is not None:
            thread_state.backward_layer, thread_state.line = self._graph.owner_of(number)
        if torch.is_grad_enabled() and thread_state.number == 0:
            self._graph.made_by_backward(thread_state.backward_layer)
        return thread_state.backward_layer

    def _backward_ends(self, thread_state: ThreadState, layer: int) -> None:
        if thread_state.number == 0:
            self._graph.backward_ends(layer)

    def mark_line(self, line: int, thread_state: ThreadState) -> None:
        """Assign the graph's operations since the last call, or the last change of layer, to ``line``."""
        if thread_state.number == 0:
            self._graph.mark_line(line)

    def owner_until_change(self, thread_state: ThreadState) -> tuple[int, int]:
        """Return the layer and phase of this thread's operations since its last change of module or phase."""
        if len(thread_state.stack) == 1:
            return thread_state.outside_owner
        layer, began_in, _ = thread_state.stack[-1]
        return layer, _phase_begun_in(began_in)


def _phase_begun_in(task: int) -> int:
    return FORWARD if task == torch_private.NO_TASK else RECOMPUTE

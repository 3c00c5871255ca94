"""Where each thread is: which module, which phase."""

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
from memlog.tracer.attribution.autograd_sequence import SequenceMap
from memlog.tracer.attribution.module_names import ModuleNames

_MAX_THREADS = 256
"""Their number is one byte of an event."""
_MAX_STEPS = 1000
"""Whose optimizers' names are kept."""

NO_INPUTS: Final = (-1, 0)
"""A module was called with no tensor among its positional arguments."""


class ThreadState:
    """Where one thread is.

    Attributes:
        number: Of the thread; 0 is the one that began the window.
        stack: The modules at work, each as its layer, the backward pass that it began in, and its identity;
            the first entry stands for "outside all modules".
        optimizing: The optimizer whose step runs, by identity.
        turn: Layer and phase of what happens outside ``forward``.
        last_backward: The layer whose backward pass was looked at last.
        line: The program's line that made the operation whose backward pass was looked at last; 0: unknown.
        node: The number of the graph's node that was looked at last; ``None`` for one that accumulates.
        made: The number that the graph's next operation had then, where that backward pass makes a graph of
            its own.
        inputs: What the module that is about to begin gets: an engine says it with its ENTER.
    """

    __slots__ = (
        "backward_layer",
        "graph_mark",
        "inputs",
        "line",
        "node",
        "number",
        "optimizing",
        "outside_owner",
        "stack",
    )

    def __init__(self, number: int) -> None:
        self.number = number
        self.stack: list[tuple[int, int, int]] = [(OUTSIDE, torch_private.NO_TASK, 0)]
        self.optimizing: int | None = None
        self.outside_owner = (OUTSIDE, FORWARD)
        self.backward_layer = OUTSIDE
        self.line = 0
        self.node: int | None = None
        self.graph_mark: int | None = None
        self.inputs = NO_INPUTS


class ModuleStack:
    """Follows modules, backward passes and optimizers on the threads that take part in a window.

    Args:
        names: Which module is which layer.
        emit: Called with kind, layer, phase and place at each change.
        all_threads: Whether threads that call the model's modules join the window; else only the one that
            began it and those that run its backward pass take part.
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
        self._sequence = SequenceMap()
        self._lines = SequenceMap()
        self._last_marked = 0
        self.closed = False

    def begin(self) -> None:
        """The window begins, on this thread."""
        self._thread_states[threading.get_ident()] = ThreadState(0)
        self._mark(OUTSIDE)

    def close(self) -> None:
        """The window is over: the stretches that are still open end here."""
        if not self.closed:
            for thread_state in list(self._thread_states.values()):
                self.set_phase(thread_state, OUTSIDE, FORWARD)
            self.closed = True

    def thread_state(self, *, join: bool = False) -> ThreadState | None:
        """This thread's place; ``None`` where it has no part in the window.

        Args:
            join: Whether it gets one now.
        """
        if self.closed:
            return None
        identity = threading.get_ident()
        thread_state = self._thread_states.get(identity)
        if thread_state is None and join and len(self._thread_states) < _MAX_THREADS:
            thread_state = self._thread_states[identity] = ThreadState(len(self._thread_states))
        return thread_state

    def module_begins(self, module: Any) -> ThreadState | None:
        """A module's ``forward`` begins.

        Returns:
            The place that it began at; ``None`` where this thread has no part in the window.
        """
        thread_state = self.thread_state(join=self._all_threads and self._names.knows(module))
        if thread_state is None:
            return None
        task = torch_private.backward_task()
        if task == torch_private.NO_TASK and thread_state.outside_owner[1] == BACKWARD:
            self._leave_graph(thread_state, thread_state.stack[-1][0])
            self.set_phase(thread_state, OUTSIDE, FORWARD)
        layer = self._names.layer_of(module, thread_state.stack[-1][0])
        thread_state.stack.append((layer, task, id(module)))
        if thread_state.number == 0:
            self._mark(layer)
        self._emit_event(
            ENTER, layer, FORWARD if task == torch_private.NO_TASK else RECOMPUTE, thread_state
        )
        return thread_state

    def module_ends(self, module: Any) -> int | None:
        """A module's ``forward`` has ended, and with it all that began in it.

        torch says so even where another's hook has raised before ours heard of its beginning.

        Returns:
            Its layer; ``None`` where its beginning was not seen.
        """
        thread_state, identity, ended = self.thread_state(), id(module), 0
        if thread_state is None or (
            thread_state.stack[-1][2] != identity and not _began_on(identity, thread_state)
        ):
            return None
        while ended != identity:
            layer, task, ended = thread_state.stack.pop()
            self._emit_event(
                EXIT, layer, FORWARD if task == torch_private.NO_TASK else RECOMPUTE, thread_state
            )
        if thread_state.number == 0:
            self._mark(thread_state.stack[-1][0])
        return layer

    def optimizer_begins(self, optimizer: Any) -> None:
        """An optimizer's step begins; of nested ones the outermost counts."""
        thread_state = self.thread_state()
        if thread_state is not None and thread_state.optimizing is None:
            thread_state.optimizing = id(optimizer)
            if len(thread_state.stack) == 1:
                self.set_phase(thread_state, OUTSIDE, OPTIMIZER)
                if len(self._names.optimizers) < _MAX_STEPS:
                    self._names.optimizers.append(type(optimizer).__name__)

    def optimizer_ends(self, optimizer: Any) -> None:
        """An optimizer's step has ended."""
        thread_state = self.thread_state()
        if thread_state is not None and thread_state.optimizing == id(optimizer):
            thread_state.optimizing = None
            self.set_phase(thread_state, OUTSIDE, FORWARD)

    def set_phase(self, thread_state: ThreadState, layer: int, phase: int) -> None:
        """What happens outside ``forward`` belongs to ``layer`` and ``phase`` from now on."""
        if thread_state.outside_owner != (layer, phase):
            thread_state.outside_owner = (layer, phase)
            self._emit_event(PHASE_CHANGE, layer, phase, thread_state)

    def owner(self, thread_state: ThreadState) -> tuple[int, int]:
        """Layer and phase of what this thread does now."""
        layer, began_in, _ = thread_state.stack[-1]
        task = torch_private.backward_task()
        if task == torch_private.NO_TASK:
            backward = thread_state.outside_owner[1] == BACKWARD
            if backward:
                self._leave_graph(thread_state, layer)
            if thread_state.optimizing is not None and len(thread_state.stack) == 1:
                self.set_phase(thread_state, OUTSIDE, OPTIMIZER)
                return OUTSIDE, OPTIMIZER
            if backward:
                self.set_phase(thread_state, OUTSIDE, FORWARD)
            return layer, FORWARD
        # A module that began in this very backward pass runs its forward again. (One that began
        # elsewhere calls backward() inside its own forward.)
        if began_in == task:
            return layer, RECOMPUTE
        layer = self._backward_layer(thread_state)
        self.set_phase(thread_state, layer, BACKWARD)
        return layer, BACKWARD

    def _backward_layer(self, thread_state: ThreadState) -> int:
        """Whose forward made the operation whose gradient is computed now.

        Nodes that accumulate gradients have no number; they follow what made the gradient.
        """
        node = torch_private.current_node() if torch_private.current_node is not None else None
        number = torch_private.sequence_number(node) if node is not None else None
        thread_state.node = number
        if number is not None:
            layer = self._sequence.layer_of(number)
            thread_state.backward_layer = OUTSIDE if layer is None else layer
            thread_state.line = self._lines.layer_of(number) or 0
        if torch.is_grad_enabled() and thread_state.number == 0:
            self._make_graph(thread_state, thread_state.backward_layer)
        return thread_state.backward_layer

    def _make_graph(self, thread_state: ThreadState, layer: int) -> None:
        """The backward pass makes a graph of its own (``create_graph=True``).

        Its operations belong to the layer whose backward pass they are. They are heard of once they have
        their numbers, so the layer has all since the last that was heard of.
        """
        if torch_private.next_sequence_number is not None:
            number = int(torch_private.next_sequence_number())
            self._sequence.since(
                number - 1 if thread_state.graph_mark is None else thread_state.graph_mark, layer
            )
            thread_state.graph_mark = number

    def _leave_graph(self, thread_state: ThreadState, layer: int) -> None:
        """That backward pass is over, and ``layer`` makes what comes now."""
        if thread_state.graph_mark is not None:
            self._sequence.since(thread_state.graph_mark, layer)
            thread_state.graph_mark = None

    def _mark(self, layer: int) -> None:
        if torch_private.next_sequence_number is not None:
            self._last_marked = int(torch_private.next_sequence_number())
            self._sequence.mark(self._last_marked, layer)
            self._lines.mark(self._last_marked, 0)

    def mark_line(self, line: int, thread_state: ThreadState) -> None:
        """The operations of the graph since the last that was heard of were made by a line of the program."""
        if thread_state.number == 0 and torch_private.next_sequence_number is not None:
            number = int(torch_private.next_sequence_number())
            if number > self._last_marked:
                self._lines.mark(self._last_marked, line)
                self._last_marked = number

    def owner_until_change(self, thread_state: ThreadState) -> tuple[int, int]:
        """Layer and phase that a thread's work belongs to until the next change."""
        if len(thread_state.stack) == 1:
            return thread_state.outside_owner
        layer, began_in, _ = thread_state.stack[-1]
        return layer, FORWARD if began_in == torch_private.NO_TASK else RECOMPUTE


def _began_on(identity: int, thread_state: ThreadState) -> bool:
    """Whether a module's beginning was seen."""
    return any(entry[2] == identity for entry in thread_state.stack)

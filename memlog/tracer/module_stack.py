"""Current module and phase of each thread, and lines that call operations outside all modules."""

from __future__ import annotations

import os
import sys
import sysconfig
import threading
from collections.abc import Callable
from pathlib import Path
from types import CodeType
from typing import Any, Final, Literal, TypeAlias

import torch

from memlog._internal.terminal import source_name
from memlog.torchside import internals
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
from memlog.tracer.module_names import ModuleNames
from memlog.tracer.owners import GraphOwners

_MAX_THREADS = 256
"""Maximum number of threads in a window, because an event has one byte for the thread's number. Operations of
further threads are not recorded."""
_MAX_STEPS = 1000
"""Maximum number of optimizer steps for which a window keeps the optimizer's name."""

NO_INPUTS: Final = (-1, 0)
"""Value of `ThreadState.inputs` for a module that is called without a tensor as positional argument."""


class ThreadState:
    """Current module and phase of one thread.

    Attributes:
        number: Number of the thread; 0 for the thread that began the window.
        is_autograds: True if the thread took part first by running a backward pass.
        stack: Running modules, the innermost last. An item has the layer, the number of the backward pass in
            which the module began, and the module's ``id``. The first item stands for "outside all modules".
        optimizing: ``id`` of the optimizer that is stepping; ``None`` if there is none.
        outside_owner: Layer and phase to which operations outside all ``forward`` calls belong.
        backward_layer: Layer whose forward operation was differentiated last.
        line: Number of the program's line whose forward operation was differentiated last; 0: unknown.
        node: Sequence number of the autograd node that ran last; ``None`` for a node that accumulates
            gradients.
        inputs: Two largest inputs of the module that is about to begin. The CPU engine gives the serial
            numbers of the inputs' storages, other engines the addresses. The module's ENTER event contains
            both inputs.
    """

    def __init__(self, number: int) -> None:
        self.number = number
        self.is_autograds = False
        self.stack: list[tuple[int, int, int]] = [(OUTSIDE, internals.NO_TASK, 0)]
        self.optimizing: int | None = None
        self.outside_owner = (OUTSIDE, FORWARD)
        self.backward_layer = OUTSIDE
        self.line = 0
        self.node: int | None = None
        self.inputs = NO_INPUTS


class ModuleStack:
    """Running modules, backward passes and optimizers of the threads that take part in a window.

    Args:
        emit: Function that is called when a module begins or ends, or when the phase changes. Its arguments
            are the kind of the event, the layer, the phase and the state of the thread.
        all_threads: True: all threads that call the model's modules take part. False: only the thread that
            began the window and the threads that run its backward pass take part.
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
        """Owners of the operations in the autograd graph of the thread that began the window."""
        self.closed = False

    def begin(self) -> None:
        """Begin the window on this thread."""
        self._thread_states[threading.get_ident()] = ThreadState(0)
        self._graph.mark(OUTSIDE)

    def close(self) -> None:
        """Close the window and end the open phases."""
        if not self.closed:
            # A list, because another thread can join during the loop.
            for thread_state in list(self._thread_states.values()):
                self.set_phase(thread_state, OUTSIDE, FORWARD)
            self.closed = True

    def thread_state(self, *, join: bool = False) -> ThreadState | None:
        """Return this thread's state; ``None`` if the thread takes no part in the window.

        ``join``: True to let the thread take part from this call on.
        """
        if self.closed:
            return None
        identity = threading.get_ident()
        thread_state = self._thread_states.get(identity)
        if thread_state is None and join and len(self._thread_states) < _MAX_THREADS:
            thread_state = self._thread_states[identity] = ThreadState(len(self._thread_states))
            thread_state.is_autograds = internals.backward_task() != internals.NO_TASK
        return thread_state

    def module_begins(self, module: Any) -> ThreadState | None:
        """Record the begin of a module's ``forward``.

        Return this thread's state; ``None`` if the thread takes no part in the window.
        """
        thread_state = self.thread_state(join=self._all_threads and self._names.knows(module))
        if thread_state is None:
            return None
        task = internals.backward_task()
        # No hook tells that a backward pass has ended. The next call of a module shows it.
        if task == internals.NO_TASK and thread_state.outside_owner[1] == BACKWARD:
            self._backward_ends(thread_state, thread_state.stack[-1][0])
            self.set_phase(thread_state, OUTSIDE, FORWARD)
        if task == internals.NO_TASK:
            self._autograds_threads_rest()
        layer = self._names.layer_of(module, thread_state.stack[-1][0])
        thread_state.stack.append((layer, task, id(module)))
        if thread_state.number == 0:
            self._graph.mark(layer)
        self._emit_event(ENTER, layer, _phase_begun_in(task), thread_state)
        return thread_state

    def module_ends(self, module: Any) -> int | None:
        """Record the end of a module's ``forward``, and return the module's layer.

        Also record the end of modules that began inside this ``forward`` and have not ended. Return ``None``
        if the begin of the module was not recorded. This happens if another hook raises before memlog's begin
        hook runs, because torch calls the end hook even then.
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
        """Record the begin of an optimizer's step. Ignore a step inside another optimizer's step."""
        thread_state = self.thread_state()
        if thread_state is not None and thread_state.optimizing is None:
            thread_state.optimizing = id(optimizer)
            self._names.optimizer_steps(optimizer)
            self._autograds_threads_rest()
            if len(thread_state.stack) == 1:
                self.set_phase(thread_state, OUTSIDE, OPTIMIZER)
                if len(self._names.optimizers) < _MAX_STEPS:
                    self._names.optimizers.append(type(optimizer).__name__)

    def optimizer_ends(self, optimizer: Any) -> None:
        thread_state = self.thread_state()
        if thread_state is not None and thread_state.optimizing == id(optimizer):
            thread_state.optimizing = None
            self.set_phase(thread_state, OUTSIDE, FORWARD)

    def _autograds_threads_rest(self) -> None:
        """End the backward passes of autograd's threads. No hook tells when they end."""
        # A list, because another thread can join during the loop.
        for thread_state in list(self._thread_states.values()):
            if thread_state.is_autograds and len(thread_state.stack) == 1:
                self.set_phase(thread_state, OUTSIDE, FORWARD)

    def set_phase(self, thread_state: ThreadState, layer: int, phase: int) -> None:
        """Set the layer and phase to which later operations outside ``forward`` belong."""
        if thread_state.outside_owner != (layer, phase):
            thread_state.outside_owner = (layer, phase)
            self._emit_event(PHASE_CHANGE, layer, phase, thread_state)

    def owner(self, thread_state: ThreadState) -> tuple[int, int]:
        """Return the layer and phase of this thread's current operation."""
        layer, began_in, _ = thread_state.stack[-1]
        task = internals.backward_task()
        if task == internals.NO_TASK:
            backward = thread_state.outside_owner[1] == BACKWARD
            if backward:
                self._backward_ends(thread_state, layer)
            if thread_state.optimizing is not None and len(thread_state.stack) == 1:
                self.set_phase(thread_state, OUTSIDE, OPTIMIZER)
                return OUTSIDE, OPTIMIZER
            if backward:
                self.set_phase(thread_state, OUTSIDE, FORWARD)
            return layer, FORWARD
        # A backward pass is running. A module that began during this pass runs its forward again (activation
        # checkpointing). A module that began before this pass has called backward() inside its own forward.
        if began_in == task:
            return layer, RECOMPUTE
        layer = self._backward_layer(thread_state)
        self.set_phase(thread_state, layer, BACKWARD)
        return layer, BACKWARD

    def _backward_layer(self, thread_state: ThreadState) -> int:
        """Return the layer whose forward operation autograd is differentiating.

        While autograd accumulates a gradient, return the layer that was differentiated last.
        """
        node = internals.current_node()
        number = internals.sequence_number(node) if node is not None else None
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
        """Assign the newest operations of the graph to ``line``.

        These are the operations since the last call of this method. If the layer has changed after that call,
        they are the operations since the change.
        """
        if thread_state.number == 0:
            self._graph.mark_line(line)

    def owner_until_change(self, thread_state: ThreadState) -> tuple[int, int]:
        """Return the layer and phase of this thread's operations until the next change of module or phase."""
        if len(thread_state.stack) == 1:
            return thread_state.outside_owner
        layer, began_in, _ = thread_state.stack[-1]
        return layer, _phase_begun_in(began_in)


def _phase_begun_in(task: int) -> int:
    return FORWARD if task == internals.NO_TASK else RECOMPUTE


MAX_LINES: Final = 1000
"""Maximum number of different lines. All further lines have number 0."""
_LONGEST: Final = 40
"""Maximum length of a file's or function's name, in characters. Longer names are cut."""
_MEMLOG: Final = f"{Path(__file__).absolute().parents[1]}{os.sep}"
_TORCH: Final = f"{Path(torch.__file__).absolute().parent}{os.sep}"
_INSTALLED: Final = (
    "<frozen ",
    *(
        f"{sysconfig.get_path(kind)}{os.sep}"
        for kind in ("stdlib", "purelib", "platlib", "scripts")
    ),
)
_ELSEWHERE: Final = frozenset(("site-packages", "dist-packages"))
"""Names of folders that hold installed packages, in this or another Python environment."""
FileOwner: TypeAlias = Literal["program", "torch", "memlog", "installed"]
_WRAPPERS: Final = frozenset(("wrapper", "inner", "decorate_context"))


class CallingLines:
    """Register of lines of the program, numbered from 1 in the order of their first calls.

    Attributes:
        lines: Texts of the lines, such as ``train.py:42 in step: cross_entropy``. In this example, line 42 is
            in the function ``step`` and calls ``cross_entropy``, a function of torch or of another package.
    """

    def __init__(self) -> None:
        self.lines: list[str] = []
        self._numbers: dict[str, int] = {}
        self._known: dict[tuple[str, int, str], int] = {}
        self._owners: dict[str, FileOwner] = {}

    def current_line(self) -> int:
        """Return the number of the program's line that this thread is executing; 0 if there is none.

        The program's line is the innermost line of the call stack outside torch, memlog and installed
        packages. If the whole program is an installed package, the program's line is the innermost line
        outside torch and memlog. After `MAX_LINES` different lines, new lines have number 0.
        """
        frame: Any = sys._getframe(1)
        installed: Any = None
        called = ""
        while frame is not None:
            code = frame.f_code
            owner = self._owners.get(code.co_filename) or self._owner_of(code.co_filename)
            if owner == "program":
                return self._number(code, frame.f_lineno, called)
            if owner == "installed":
                installed = installed or frame
            # The frames lead outwards. The last name is that of the function that the program calls.
            if (owner == "torch" and installed is None) or (owner == "installed" and not called):
                name = code.co_name
                if not name.startswith(("_", "<")) and name not in _WRAPPERS:
                    called = name
            frame = frame.f_back
        return 0 if installed is None else self._number(installed.f_code, installed.f_lineno, "")

    def current_text(self) -> str:
        """Return the text of the line that `current_line` finds; empty if `current_line` returns 0."""
        number = self.current_line()
        return self.lines[number - 1] if number else ""

    def is_program(self, file: str) -> bool:
        """Return whether a source file is outside torch, memlog and all installed packages."""
        return (self._owners.get(file) or self._owner_of(file)) == "program"

    def _owner_of(self, file: str) -> FileOwner:
        owner: FileOwner = "program"
        if file.startswith(_MEMLOG):
            owner = "memlog"
        elif file.startswith(_TORCH):
            owner = "torch"
        elif file.startswith(_INSTALLED) or not _ELSEWHERE.isdisjoint(Path(file).parts):
            owner = "installed"
        self._owners[file] = owner
        return owner

    def _number(self, code: CodeType, line: int, called: str) -> int:
        key = code.co_filename, line, called
        number = self._known.get(key)
        if number is None:
            number = self._number_of(_text(code, line, called))
            if len(self._known) < MAX_LINES:
                self._known[key] = number
        return number

    def _number_of(self, text: str) -> int:
        number = self._numbers.get(text)
        if number is None:
            if len(self.lines) >= MAX_LINES:
                return 0
            self.lines.append(text)
            number = self._numbers[text] = len(self.lines)
        return number


def _text(code: CodeType, line: int, called: str) -> str:
    function = "" if code.co_name == "<module>" else f" in {_short(code.co_name)}"
    called = f": {_short(called)}" if called else ""
    return f"{_short(source_name(code.co_filename))}:{line}{function}{called}"


def _short(name: str) -> str:
    shown = "".join(character if character.isprintable() else "?" for character in name)
    return shown if len(shown) <= _LONGEST else f"{shown[: _LONGEST - 1]}…"

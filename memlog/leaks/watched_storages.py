"""Watch over the storages that a few whole iterations make, to see which of them are alive later."""

from __future__ import annotations

import functools
import itertools
import time
import weakref
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager
from typing import Any, Final, NamedTuple

import torch
from torch import Tensor
from torch.nn.modules.module import (
    register_module_forward_hook,
    register_module_forward_pre_hook,
)

from memlog._internal import processes
from memlog._internal.diagnostics import Diagnostics
from memlog._internal.inert_access import instance_dict, values_in
from memlog.leaks.live_tensors import parts_of, tensor_storage
from memlog.torchside import internals
from memlog.torchside.tensors import DisableTorchFunction
from memlog.trace.encoding import OUTSIDE_PATH, PHASES
from memlog.tracer.engines.dispatch_mode import NEW, RESIZED, RESULT, ObservingMode, kind_of
from memlog.tracer.function_patch import (
    BACKWARD_PASSES,
    COMPILE_WARNING_FILTER,
    remove_when_possible,
)
from memlog.tracer.module_names import ModuleNames
from memlog.tracer.module_stack import CallingLines, ModuleStack, ThreadState
from memlog.tracer.tensor_storages import is_wrapper
from memlog.tracer.window import may_open

MAX_STORAGES: Final = 100_000
"""Maximum number of storages that are watched at once."""
_MAX_VALUES: Final = 100
"""Maximum number of values that are looked at in the arguments of one call."""
_PLAIN: Final = frozenset((Tensor, torch.nn.Parameter))


def may_watch() -> bool:
    """Return whether a dispatch mode can be active during whole iterations without an effect on the program.

    If torch's compiler is in use, a mode changes the compiled code. If torch's profiler records, the profiler
    counts each operation twice while a mode is active.
    """
    return may_open() and not internals.compiler_in_use() and not internals.profiling()


class Site(NamedTuple):
    """Place in the program where storages are made.

    Attributes:
        line: Line of the program, such as ``train.py:42 in step: cross_entropy``; empty if unknown.
        layer: Path of the module that ran; "outside all modules" if none did.
        phase: Phase of the step, such as ``forward``.
        operation: Name of the operation that made the storage. Empty if the storage was first seen as an
            argument of an operation or a module.
        evaluating: True if the module that ran was in evaluation mode.
    """

    line: str
    layer: str
    phase: str
    operation: str
    evaluating: bool

    @property
    def inside_module(self) -> bool:
        return self.layer != OUTSIDE_PATH


class WatchedStorage(NamedTuple):
    """A storage that a watched iteration made.

    ``size`` is the size in bytes when the storage was made. ``iteration`` is the number of the watched
    iteration, from 0. ``shape`` and ``dtype``, such as ``float32``, are those of the storage's first tensor.
    """

    reference: weakref.ref[Any]
    size: int
    iteration: int
    site: Site
    shape: tuple[int, ...]
    dtype: str


class StorageMode(ObservingMode):  # type: ignore[no-untyped-call] # torch's base has no types
    """Dispatch mode that passes each operation's arguments and results to its observer.

    The mode does not measure workspaces. Backward passes run without the mode. While any dispatch mode is
    active, torch computes some derivatives in another way (``isTensorSubclassLike`` in torch's sources). The
    last bits of these derivatives can differ from a run without a mode.
    """

    def begin(self) -> None:
        # A forked child has a copy of this thread's modes. The child must not be watched.
        processes.renew(self, "_observer", lambda: None)
        BACKWARD_PASSES.add(self)
        super().begin()

    def during_backward(
        self, outputs: Sequence[Any], *, makes_cycles: bool
    ) -> AbstractContextManager[None]:
        """Return a context in which this mode is not active."""
        del outputs
        if makes_cycles and isinstance(self._observer, StorageWatch):
            self._observer.note_cycles()
        return internals.without_mode(self)

    def _removed_from_stack(self) -> None:
        super()._removed_from_stack()
        BACKWARD_PASSES.remove(self)

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        observer = self._observer
        if types and observer is not None and any(map(is_wrapper, types)):
            return NotImplemented  # the wrapper then calls operations on its inner tensors
        out = func(*args, **kwargs) if kwargs else func(*args)
        if observer is not None:
            try:
                observer.operation(func, _result_kind(func), args, out, None)
            except Exception as error:  # noqa: BLE001 - training goes on
                self.failures += 1
                self._diagnostics.fault("watching an operation", error)
        return out


@functools.cache
def _result_kind(func: Any) -> int:
    return kind_of(func) & RESULT


class StorageWatch:
    """Watch over the storages that the program makes on this thread, outside of backward passes.

    A storage that a backward pass made is noticed when a later operation uses it.

    Only weak references to storages are kept. ``existing`` has weak references to the storages that exist
    already, by the storage's identity. The watch begins and ends between two optimizer steps. If the watch
    has taken ``most_seconds`` of processor time, it ends earlier, within an iteration.

    Attributes:
        iteration: Number of the current iteration, from 0.
        first_node: Number of the first graph node of the watch; ``None`` if unknown.
        end_node: Number of the first graph node after the last counted iteration; ``None`` if the watch has
            not ended or has never begun.
        seconds: Processor seconds that the watch has taken so far.
        cycles_made_at: Line that called ``backward(create_graph=True)``; empty if no line did.
    """

    def __init__(
        self,
        diagnostics: Diagnostics,
        existing: dict[int, weakref.ref[Any]],
        most_seconds: float,
    ) -> None:
        self._existing = existing
        self._most_seconds = most_seconds
        self.iteration = 0
        self.first_node: int | None = None
        self.end_node: int | None = None
        self._counted_node: int | None = None
        self.seconds = 0.0
        self.cycles_made_at = ""
        self._diagnostics = diagnostics
        self._storages: dict[int, WatchedStorage] = {}
        self._lines = CallingLines()
        self._names = ModuleNames()
        self._stack = ModuleStack(self._names, _ignore, all_threads=False)
        self._mode = StorageMode(self, diagnostics)
        self._handles: list[Any] = []
        self._evaluating = False
        processes.renew(self._stack, "closed", lambda: True)  # a forked child is not watched

    def begin(self) -> None:
        self.first_node = internals.next_sequence_number()
        COMPILE_WARNING_FILTER.add(self)
        self._handles.append(register_module_forward_pre_hook(self._module_begins))
        # `always_call`: also if `forward` raises, so that the stack of modules stays right.
        self._handles.append(register_module_forward_hook(self._module_ends, always_call=True))
        self._stack.begin()
        self._mode.begin()

    @property
    def ended(self) -> bool:
        """True if the watch has ended. If its time is used up, it ends in the middle of an iteration."""
        return self.end_node is not None or self.seconds >= self._most_seconds

    def iteration_ended(self) -> None:
        """Count an iteration, and forget the storages that are freed already.

        The first iteration always counts. If the watch ended within a later iteration, that iteration does
        not count, and its storages are forgotten. An incomplete iteration would lower the mean of the memory
        that an iteration keeps.
        """
        self._storages = self.alive()
        if not self.ended or not self.iteration:
            self.iteration += 1
            self._counted_node = internals.next_sequence_number()
            return
        self._storages = {
            key: watched
            for key, watched in self._storages.items()
            if watched.iteration < self.iteration
        }

    def end(self) -> None:
        """End the watch. A second call is harmless."""
        self._existing = {}
        self._mode.stop_observing()
        if self._handles:
            self.end_node = self._counted_node or internals.next_sequence_number()
            while self._handles:
                self._handles.pop().remove()
            COMPILE_WARNING_FILTER.remove(self)
            self._stack.close()
            # Modes are in a stack. A mode below another one can only be removed later.
            remove_when_possible(self)

    def leave(self) -> bool:
        return self._mode.leave()

    def alive(self) -> dict[int, WatchedStorage]:
        """Return the watched storages that are alive, by identity."""
        return {
            key: watched
            for key, watched in self._storages.items()
            if watched.reference() is not None
        }

    def note_cycles(self) -> None:
        """Remember the line that calls ``backward(create_graph=True)`` now."""
        self.cycles_made_at = self._lines.current_text()

    def before_change(self, values: Any) -> None:
        """Do nothing: a `StorageMode` never calls this method of an observer."""

    def operation(self, func: Any, kind: int, args: Any, out: Any, inside: Any) -> None:
        """Watch the new storages in an operation's results and arguments."""
        del inside
        if internals.tracing_graph():
            return  # sizes would become a part of the traced graph
        began = time.thread_time()
        state = self._stack.thread_state(join=True)
        if state is not None:
            self._watch(args, "", state)
            # Other operations return views of arguments, or the arguments themselves.
            if kind & (NEW | RESIZED):
                self._watch(out, internals.operation_name(func), state)
        self._count(time.thread_time() - began)

    def _count(self, seconds: float) -> None:
        """Add processor seconds that the watch has taken. If ``most_seconds`` is reached, end the watch."""
        self.seconds += seconds
        if self.ended:
            self._mode.stop_observing()  # the mode itself can't be removed within an operation

    def _watch(self, values: Any, operation: str, state: ThreadState) -> None:
        with DisableTorchFunction():  # `__torch_function__` can be the program's code
            tensors = (values,) if type(values) in _PLAIN else plain_tensors(values)
            for tensor in itertools.chain.from_iterable(map(parts_of, tensors)):
                storage = None if tensor.is_meta else tensor_storage(tensor)
                if storage is not None and not self._knows(storage, as_argument=not operation):
                    number, phase = self._stack.owner(state)
                    line, layer = self._lines.current_text(), self._names.paths[number]
                    self._storages[storage._cdata] = WatchedStorage(
                        weakref.ref(storage),
                        storage.nbytes(),
                        self.iteration,
                        Site(line, layer, PHASES[phase], operation, self._evaluating),
                        () if tensor.is_nested else tuple(tensor.shape),
                        str(tensor.dtype).removeprefix("torch."),
                    )

    def _knows(self, storage: Any, *, as_argument: bool) -> bool:
        """Return True if a storage is watched already, or must not be watched.

        If `MAX_STORAGES` are watched, no further storage is watched. An argument of an operation is not
        watched if it existed before the watch.
        """
        known = self._storages.get(storage._cdata)
        # After a storage is freed, another one can get its identity.
        if known is not None and known.reference() is storage:
            return True
        if as_argument:
            existing = self._existing.get(storage._cdata)
            if existing is not None and existing() is storage:
                return True
        return len(self._storages) >= MAX_STORAGES

    def _module_begins(self, module: Any, args: Any) -> None:
        if torch.compiler.is_compiling() or internals.tracing_graph():
            return
        if internals.profiling() or not self._mode.measures:
            self.end()  # with this dispatch mode, the profiler would count each operation twice
            return
        began = time.thread_time()
        with self._diagnostics.contained("noticing that a module begins"):
            state = self._stack.module_begins(module)
            if state is not None:
                self._evaluating = (instance_dict(module) or {}).get("training") is False
                self._watch(args, "", state)
        self._count(time.thread_time() - began)

    def _module_ends(self, module: Any, _args: Any, _output: Any) -> None:
        if not torch.compiler.is_compiling():
            with self._diagnostics.contained("noticing that a module ends"):
                self._stack.module_ends(module)


def plain_tensors(values: Any, limit: int = _MAX_VALUES) -> Iterator[Tensor]:
    """Yield the tensors of torch's own classes in an operation's or a module's arguments.

    ``limit`` is the maximum number of values that are looked at.
    """
    for value in values_in(values, limit):
        if any(type(value) is kind for kind in _PLAIN):
            yield value  # type: ignore[misc] # it is a tensor


def _ignore(_kind: int, _layer: int, _phase: int, _state: ThreadState) -> None:
    """Ignore a change of module or phase: the watch reads both from the stack when it needs them."""

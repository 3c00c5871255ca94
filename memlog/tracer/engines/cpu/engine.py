"""The engine for tensors on the CPU: sees every operation's results, and when their storages go.

What a storage takes is what its operation asked the allocator for, so live bytes are the allocator's own, but
for what an operation allocates and frees inside itself.
"""

from __future__ import annotations

import weakref
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor

from memlog._internal.diagnostics import Diagnostics
from memlog.trace.encoding import (
    BACKWARD,
    BEFORE,
    ENTER,
    FORWARD,
    GRADIENT,
    INPUT,
    OPTIMIZER_STATE,
    OUTSIDE,
    PARAMETER,
    pack,
)
from memlog.trace.storage_uses import UNKNOWN_TYPE
from memlog.tracer import torch_private
from memlog.tracer.attribution.calling_lines import Callers
from memlog.tracer.attribution.module_names import ModuleNames
from memlog.tracer.attribution.module_stack import NO_INPUTS, ModuleStack, ThreadState
from memlog.tracer.attribution.parameter_owners import Owners
from memlog.tracer.engines.base import Finding
from memlog.tracer.engines.cpu import dispatch_mode, limitations, op_workspace, patches
from memlog.tracer.engines.cpu.autocast_types import Precision
from memlog.tracer.engines.cpu.dispatch_copies import Copies
from memlog.tracer.engines.cpu.live_storages import MOST_LIVE, SMALL, LiveStorages
from memlog.tracer.engines.cpu.op_workspace import Scratch
from memlog.tracer.engines.cpu.patches import Tap
from memlog.tracer.event_log import EventLog
from memlog.tracer.hooks.module_hooks import Hooks
from memlog.tracer.tensor_storages import optimizer_tensors, parameters_of, tensors_in

_LIFT_FRESH = torch.ops.aten.lift_fresh.default
_NAMED = 8
"""Operations that are named, at most."""


class DispatchEngine:
    """Records one window on the thread that starts it, and on those that run its backward pass.

    Args:
        log: Where events go.
        names: Which module is which layer.
        diagnostics: Where errors are counted.
        types: Whether it is found out what each storage would hold under autocast.
    """

    def __init__(
        self, log: EventLog, names: ModuleNames, diagnostics: Diagnostics, *, types: bool = False
    ) -> None:
        self._log = log
        self._diagnostics = diagnostics
        self._hooks = Hooks(self, diagnostics)
        self._mode = dispatch_mode.ObservingMode(self, diagnostics)
        self._fakes = torch_private.faking()
        self._live_storages = LiveStorages(log, fakes=self._fakes, types=types)
        self._copies = Copies(self._live_storages)
        self._callers = Callers()
        self._precision = Precision(self._live_storages) if types else None
        self._owners = Owners(names)
        self._module_stack = ModuleStack(names, self._emit, everywhere=False)
        self._stopped = False
        self._stepped = weakref.WeakSet[Any]()
        self._unmeasured: Counter[str] = Counter()
        self._transformed = self._late_gradients = self._precision_changed = False
        self._compiled_calls = 0
        self._code: Sequence[Tap] = ()

    def start(self, optimizers: Sequence[Any] = ()) -> None:
        """Begins to record on this thread."""
        self._module_stack.begin()
        self._seed()
        for optimizer in optimizers:
            self._look_at_optimizer(optimizer)
        op_workspace.look_at_precisions()
        self._hooks.install()
        self._code = patches.compiled_code()
        for tap, listener in self._patches():
            tap.subscribe(listener)
        self._mode.begin()

    def stop(self) -> Finding:
        """Ends recording. Calling it again only tries to take the mode out."""
        if not self._stopped:
            self._stopped = True
            self._hooks.remove()
            for tap, listener in self._patches():
                tap.unsubscribe(listener)
            with self._diagnostics.contained("ending a trace"):
                if self._module_stack.thread_state() is not None:
                    self._look_at_parameters()  # of another thread they may change at any moment
                self._precision_changed = op_workspace.look_at_precisions()
            self._module_stack.close()
            self._live_storages.close()
        self.leave()
        dropped = {}
        if self._unmeasured:
            dropped["operations whose scratch space could not be measured"] = sum(
                self._unmeasured.values()
            )
        if self._compiled_calls:
            dropped["calls of compiled code, whose allocations are not seen"] = self._compiled_calls
        if self._live_storages.omitted:
            dropped[
                f"storages under {SMALL // 1024} KiB past the first {MOST_LIVE:,} live ones"
            ] = self._live_storages.omitted
        self._log.fold()
        books = self._log.books
        unlike = self._copies.unlike(books.before_bytes + books.peak_bytes)
        reason = "the CPU has no caching allocator, so nothing is reserved"
        missed = self._missed()
        return Finding(
            unseen=(
                *limitations.ALWAYS,
                *((limitations.TRANSFORMED,) if self._transformed else ()),
                *missed,
                *((unlike,) if unlike else ()),
            ),
            fragmentation_reason=reason,
            dropped=dropped,
            lines=tuple(self._callers.lines),
            incomplete=bool(missed or self._live_storages.omitted),
            approximate=unlike is not None,
        )

    def _missed(self) -> tuple[str, ...]:
        """Why peaks are lower bounds, in whole sentences."""
        live_storages = self._live_storages
        found = {
            limitations.SPARSE: live_storages.sparse,
            limitations.COMPLEX: live_storages.complex,
            limitations.NESTED: live_storages.nested,
            limitations.LATE_GRADIENTS: self._late_gradients,
            limitations.FAILED: self._mode.failures,
            limitations.PRECISION: self._precision_changed,
            limitations.COMPILED: self._compiled_calls
            or len(patches.compiled_code()) > len(self._code),
        }
        missed = [sentence for sentence, applies in found.items() if applies]
        if unknown := torch_private.foreign_compilers():
            missed.append(
                "Nobody knows whether code of these compilers ran, nor what it allocates, so that peaks and "
                f"what is live at the end are lower bounds: {', '.join(unknown[:_NAMED])}."
            )
        if self._unmeasured:
            names = ", ".join(name for name, _ in self._unmeasured.most_common(_NAMED))
            more = len(self._unmeasured) - _NAMED
            missed.append(
                "Nobody knows what these operations allocate and free inside themselves, so that peaks are "
                f"lower bounds: {names}" + (f" and {more} more." if more > 0 else ".")
            )
        return tuple(missed)

    def give_up(self) -> None:
        """Records nothing more. The mode, which may be at work right now, only rests."""
        self._mode.rest()
        self._module_stack.closed = True

    def leave(self) -> bool:
        """Takes the mode out where it is on top of this thread's stack; ``True`` once it is out."""
        return self._mode.leave()

    # What the hooks tell.

    def module_begins(self, module: Any, args: Any) -> None:
        """A module's ``forward`` begins."""
        tensors = tensors_in(args)
        before = self._module_stack.thread_state()
        if before is not None:
            before.inputs = self._live_storages.largest(tensors) if tensors else NO_INPUTS
        thread_state = self._module_stack.module_begins(module)
        self._transformed = self._transformed or torch_private.transforming()
        if self._owners.unknown:
            self._seed()
        if thread_state is None:
            return
        _outside, *modules = thread_state.stack
        if len(modules) == 1 and modules[0][1] == torch_private.NO_TASK:
            for tensor in tensors:
                if tensor.grad_fn is None:
                    self._live_storages.classify(tensor, OUTSIDE, INPUT)

    def module_ends(self, module: Any, output: Any) -> None:
        """It has ended."""
        del output
        self._module_stack.module_ends(module)

    def optimizer_begins(self, optimizer: Any) -> None:
        """An optimizer's step begins."""
        if self._module_stack.thread_state() is None:
            return
        self._look_at_optimizer(optimizer)
        self._tell_whose_state(optimizer)
        self._module_stack.optimizer_begins(optimizer)

    def optimizer_ends(self, optimizer: Any) -> None:
        """It has ended."""
        if self._module_stack.thread_state() is not None:
            self._look_at_state(optimizer)
            self._tell_whose_state(optimizer)
            self._module_stack.optimizer_ends(optimizer)

    # What the dispatch mode tells.

    def changes(self, values: Any) -> None:
        """An operation may change the storages of what it is given: they are met while they are there."""
        if self._module_stack.thread_state(join=True) is not None:
            for tensor in tensors_in(values):
                self._live_storages.meet(tensor)

    def operation(self, func: Any, kind: int, args: Any, out: Any, inside: Scratch | None) -> None:
        """An operation has run whose result may be a storage of its own, or that takes more inside."""
        thread_state = self._module_stack.thread_state(join=True)
        if thread_state is None:
            return
        result = kind & dispatch_mode.RESULT
        if result == dispatch_mode.DETACHED:
            self._look_at_detached(out)
            return
        layer, phase = self._owner(thread_state)
        made = UNKNOWN_TYPE
        if result == dispatch_mode.NEW:
            if not (func is _LIFT_FRESH and self._is_foreign(out)):
                made = self._look_at_new(func, args, out, layer, phase, thread_state)
        elif result:
            self._live_storages.sparse = self._live_storages.sparse or bool(
                result & dispatch_mode.WRITTEN
            )
            self._look_at_resized(out, layer, phase, thread_state)
        if inside is not None:
            self._live_storages.passing(
                inside.peak - inside.kept, layer, phase, thread_state.number, made
            )
        elif kind > dispatch_mode.RESULT:
            self._count_unmeasured(func)
        self._fold()

    def _owner(self, thread_state: ThreadState) -> tuple[int, int]:
        """Layer and phase of what runs now, and for the books its line, if it runs in no module."""
        layer, phase = self._module_stack.owner(thread_state)
        line = 0
        if layer == OUTSIDE:
            line = thread_state.line if phase == BACKWARD else 0
            line = line or self._callers.here()
            if phase == FORWARD:
                self._module_stack.made_by_line(line, thread_state)
        self._live_storages.line = line
        return layer, phase

    def _look_at_new(
        self, func: Any, args: Any, out: Any, layer: int, phase: int, thread_state: ThreadState
    ) -> int:
        """The results of an operation, and what they would be under autocast."""
        before = self._live_storages.serial
        instead = self._copies.replaced(func, args, out, phase, thread_state)
        for tensor in (out,) if isinstance(out, Tensor) else tensors_in(out):
            self._live_storages.see(tensor, layer, phase, thread_state.number, instead)
        if self._precision is None:
            return UNKNOWN_TYPE
        return self._precision.operation(func, args, out, layer, phase, before)

    def _count_unmeasured(self, func: Any) -> None:
        if not self._fakes:
            self._unmeasured[str(func)] += 1

    def _is_foreign(self, tensor: Tensor) -> bool:
        """Whether a tensor lies on memory that is not torch's, such as numpy's."""
        return not (self._fakes or tensor.untyped_storage().resizable())

    def _look_at_resized(self, out: Any, layer: int, phase: int, thread_state: ThreadState) -> None:
        for tensor in tensors_in(out):
            if tensor.is_cpu:
                self._live_storages.see_resized(
                    tensor.untyped_storage(), layer, phase, thread_state.number
                )

    def _look_at_detached(self, out: Any) -> None:
        """A gradient that is taken over uncopied is detached, in the node that belongs to its parameter."""
        if (
            torch_private.backward_task() == torch_private.NO_TASK
            or torch_private.current_node is None
        ):
            return
        parameter = getattr(torch_private.current_node(), "variable", None)
        if parameter is not None and isinstance(out, Tensor):
            self._look_at_gradient(parameter, out)

    # What the taps tell.

    def _patches(self) -> Iterator[tuple[Tap, Callable[[Any, Any], None]]]:
        yield patches.RESIZES, self._storage_resized
        yield patches.RANDOM_STATES, self._random_state_copied
        for tap in self._code:
            yield tap, self._compiled_code_ran

    def _compiled_code_ran(self, _result: Any, _args: Any) -> None:
        with self._diagnostics.contained("noticing that compiled code ran"):
            if self._module_stack.thread_state() is not None:
                self._compiled_calls += 1

    def _random_state_copied(self, state: Any, _args: Any) -> None:
        with self._diagnostics.contained("noticing a copy of a generator's state"):
            thread_state = self._module_stack.thread_state()
            if thread_state is not None:
                layer, phase = self._owner(thread_state)
                self._live_storages.see(state, layer, phase, thread_state.number)

    def _storage_resized(self, _result: Any, args: Any) -> None:
        storage = args[0]
        with self._diagnostics.contained("noticing that a storage was resized"):
            thread_state = self._module_stack.thread_state()
            if thread_state is not None and storage.device.type == "cpu":
                layer, phase = self._owner(thread_state)
                self._live_storages.see_resized(storage, layer, phase, thread_state.number)

    # What is there already.

    def _seed(self) -> None:
        for tensor, layer, category in self._owners.adopt():
            self._live_storages.classify(tensor, layer, category)

    def _look_at_parameters(self) -> None:
        """Those of lazy modules were not there before."""
        for parameter, layer in self._owners.parameters():
            self._live_storages.classify(parameter, layer, PARAMETER)
            if parameter.grad is not None:
                self._look_at_gradient(parameter, parameter.grad)

    def _look_at_gradient(self, parameter: Any, gradient: Tensor) -> None:
        """One that a parameter of the model's did not have before is new, also where nobody saw it made."""
        layer = self._owners.of(parameter)
        phase = BEFORE if layer == OUTSIDE else BACKWARD
        if self._live_storages.classify(gradient, layer, GRADIENT, phase) and phase == BACKWARD:
            self._late_gradients = True

    def _look_at_optimizer(self, optimizer: Any) -> None:
        for parameter in parameters_of(optimizer):
            self._live_storages.classify(parameter, self._owners.of(parameter), PARAMETER)
            if parameter.grad is not None:
                self._look_at_gradient(parameter, parameter.grad)
        self._look_at_state(optimizer)

    def _look_at_state(self, optimizer: Any) -> None:
        for state in optimizer_tensors(optimizer):
            self._live_storages.classify(
                state.tensor, self._owners.of_state(state), OPTIMIZER_STATE
            )

    def _tell_whose_state(self, optimizer: Any) -> None:
        """Repeat of state that was known before as which step's it counts, as the optimizer first steps."""
        if optimizer not in self._stepped:
            self._stepped.add(optimizer)
            for state in optimizer_tensors(optimizer):
                self._live_storages.repeat(state.tensor, self._owners.of_state(state))

    def _emit(self, kind: int, layer: int, phase: int, thread_state: ThreadState) -> None:
        key, size = thread_state.inputs if kind == ENTER else (0, 0)
        self._live_storages.settle()
        self._log.append(
            pack(key, size, self._log.now(), layer, kind, phase, 0, thread_state.number)
        )
        self._fold()

    def _fold(self) -> None:
        if self._log.full:
            self._log.fold()

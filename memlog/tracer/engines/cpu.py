"""Engine for tensors on the CPU: records the results of every operation, and when their storages are freed.

The size of a storage is the number of bytes that the operation requested from the allocator. So the trace
shows the bytes that are live in the allocator. `op_workspace` measures the bytes that an operation allocates
and frees inside itself.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterable, Sequence
from typing import Any, Final

from memlog._internal.diagnostics import Diagnostics
from memlog.torchside import internals
from memlog.trace.encoding import ENTER, INPUT, OUTSIDE, WORKSPACE, pack
from memlog.trace.records import Exactness
from memlog.tracer.engines import base, op_workspace, operation_recorder
from memlog.tracer.engines.base import EngineReport
from memlog.tracer.engines.dispatch_mode import FakesMode, ObservingMode, UncompiledMode
from memlog.tracer.engines.live_storages import (
    MOST_LIVE,
    SMALL_STORAGE,
    LiveStorages,
    ModelTensors,
)
from memlog.tracer.engines.operation_recorder import CompiledCode, OperationRecorder
from memlog.tracer.engines.patches import PatchListeners, UntracedDerivatives
from memlog.tracer.engines.simulated_step import SIMULATED
from memlog.tracer.engines.storage_events import EventLog
from memlog.tracer.function_patch import BACKWARD_PASSES
from memlog.tracer.module_hooks import Hooks
from memlog.tracer.module_names import ModuleNames
from memlog.tracer.module_stack import NO_INPUTS, ModuleStack, ThreadState
from memlog.tracer.owners import WrapperMemory
from memlog.tracer.tensor_storages import tensors_in

_MOST_ELSEWHERE: Final = 256
"""Maximum number of module calls on other threads to remember."""


class DispatchEngine:
    """Engine that records the thread that calls `start`, and the threads of this thread's backward passes."""

    def __init__(
        self, log: EventLog, names: ModuleNames, diagnostics: Diagnostics, *, types: bool = False
    ) -> None:
        self._log = log
        self._names = names
        self._diagnostics = diagnostics
        self._hooks = Hooks(self, diagnostics, log.took)
        fakes = internals.fakes_active()
        self._live_storages = LiveStorages(log, fakes=fakes, types=types)
        self._model_tensors = ModelTensors(names, self._live_storages)
        self._module_stack = ModuleStack(names, self._emit, all_threads=False)
        self._operations = OperationRecorder(
            log,
            self._live_storages,
            self._module_stack,
            self._model_tensors,
            fakes=fakes,
            types=types,
        )
        mode = FakesMode if fakes else ObservingMode
        mode = UncompiledMode if internals.compiler_in_use() else mode
        self._mode = mode(self._operations, diagnostics, log.took)
        self._patches = PatchListeners(
            self._live_storages, self._module_stack, self._operations.owner, diagnostics
        )
        self._compiled = CompiledCode(
            self._live_storages,
            self._module_stack,
            self._mode,
            self._operations.owner,
            diagnostics,
        )
        self._derivatives = UntracedDerivatives(
            self._mode, self._operations.add_result, diagnostics
        )
        self._wrappers = WrapperMemory(self._live_storages.made_as)
        self._stopped = False
        self._transformed = self._precision_changed = False
        self._called_elsewhere: list[weakref.ref[Any]] = []

    def start(self, optimizers: Sequence[Any] = ()) -> None:
        self._module_stack.begin()
        self._model_tensors.add_new_roots()
        for optimizer in optimizers:
            self._model_tensors.add_optimizer(optimizer)
        # The tensors of models and optimizers are classified already. The others have no known category.
        for fake in internals.live_fakes():
            self._live_storages.track_existing(fake)
        for workspace in SIMULATED.kept_by_libraries():
            self._live_storages.classify(workspace, OUTSIDE, WORKSPACE)
        op_workspace.update_precisions()
        self._hooks.install()
        self._patches.subscribe()
        self._compiled.begin()
        self._wrappers.begin()
        BACKWARD_PASSES.add(self._derivatives)
        self._mode.begin()

    def stop(self) -> EngineReport:
        """Stop recording. A second call only tries to remove the dispatch mode."""
        if not self._stopped:
            self._stopped = True
            self._hooks.remove()
            self._patches.unsubscribe()
            self._compiled.end()
            self._wrappers.end()
            BACKWARD_PASSES.remove(self._derivatives)
            with self._diagnostics.contained("ending a trace"):
                if self._module_stack.thread_state() is not None:
                    self._model_tensors.add_parameters()  # unsafe on other threads: parameters may change
                self._precision_changed = op_workspace.update_precisions()
            self._module_stack.close()
            self._live_storages.close()
            if elsewhere := self._live_storages.elsewhere():
                self._log.leave_out(elsewhere)
        self.leave()
        return self._report()

    def _report(self) -> EngineReport:
        omitted = (
            f"storages under {SMALL_STORAGE // 1024} KiB past the first {MOST_LIVE:,} live ones"
        )
        dropped = {
            "operations whose scratch space could not be measured": self._operations.unmeasured.total(),
            "calls of compiled code, whose allocations are not all known": self._compiled.unknown,
            omitted: self._live_storages.omitted,
        }
        self._log.fold()
        accountant = self._log.accountant
        peak = accountant.before_bytes + accountant.peak_bytes
        altered = operation_recorder.altered_derivatives(self._operations.altered, peak)
        missed = self._missed(peak)
        incomplete = missed or self._live_storages.omitted
        paths = self._names.final_paths() if self._compiled.calls else ()
        regions = [paths[layer] for layer in sorted(self._compiled.calls)]
        # With altered derivatives, the peak without tracing may be lower or higher.
        exactness: Exactness = (
            "approximate" if altered else "lower bound" if incomplete else "exact"
        )
        return EngineReport(
            unseen=(
                *operation_recorder.ALWAYS,
                *((operation_recorder.TRANSFORMED,) if self._transformed else ()),
                *((operation_recorder.compiled(regions),) if regions else ()),
                *missed,
                *((altered,) if altered else ()),
            ),
            fragmentation_reason=base.NOTHING_RESERVED,
            dropped={reason: count for reason, count in dropped.items() if count},
            lines=tuple(self._operations.lines),
            exactness=exactness,
        )

    def _missed(self, peak: int) -> tuple[str, ...]:
        """Return the reasons why peaks are lower bounds, in whole sentences."""
        live_storages = self._live_storages
        limits = {
            operation_recorder.SPARSE: live_storages.sparse,
            operation_recorder.COMPLEX: live_storages.complex,
            operation_recorder.NESTED: live_storages.nested,
            operation_recorder.LATE_GRADIENTS: self._model_tensors.late_gradients,
            operation_recorder.THREADS: self._parts_called_elsewhere(),
            operation_recorder.FAILED: self._mode.failures,
            operation_recorder.PRECISION: self._precision_changed,
            operation_recorder.COMPILED: self._compiled.unknown or self._compiled.may_have_run,
        }
        missed = [sentence for sentence, applies in limits.items() if applies]
        if compilers := internals.unknown_compilers():
            missed.append(operation_recorder.unknown_compilers(compilers))
        if unmeasured := self._operations.unmeasured:
            missed.append(operation_recorder.unmeasured(unmeasured))
        if untraced := operation_recorder.untraced_derivatives(self._derivatives.returned, peak):
            missed.append(untraced)
        return tuple(missed)

    def _parts_called_elsewhere(self) -> bool:
        """Return whether another thread has called a part of the traced models.

        Modules of others, such as those of a second training, do not count, unless no model is known.
        """
        called = [
            module
            for module in (reference() for reference in self._called_elsewhere)
            if module is not None
        ]
        return any(map(self._names.knows, called)) or bool(called and not self._names.roots)

    def stop_recording(self) -> None:
        """Stop recording. `stop` removes the dispatch mode later: an operation may be running in the mode."""
        self._mode.stop_observing()
        self._module_stack.closed = True

    def leave(self) -> bool:
        return self._mode.leave()

    @property
    def streams(self) -> dict[int, int]:
        """See `LiveStorages`."""
        return self._live_storages.streams

    def serials(self, tensors: Iterable[Any]) -> dict[int, int]:
        """Return the serial numbers of the tensors' storages by the storages' identity."""
        tracked = (self._live_storages.tracked(tensor) for tensor in tensors)
        return {storage.pointer: storage.serial for storage in tracked if storage is not None}

    # Calls from hooks.

    def module_begins(self, module: Any, args: Any) -> None:
        tensors = tensors_in(args)
        before = self._module_stack.thread_state()
        if before is not None:
            before.inputs = self._live_storages.largest(tensors) if tensors else NO_INPUTS
        thread_state = self._module_stack.module_begins(module)
        self._transformed = self._transformed or internals.in_functorch_transform()
        self._model_tensors.add_new_roots()
        if thread_state is None:
            if not self._module_stack.closed and len(self._called_elsewhere) < _MOST_ELSEWHERE:
                self._called_elsewhere.append(weakref.ref(module))
            return
        _outside, *modules = thread_state.stack
        # In a backward pass, checkpointing calls modules again.
        if len(modules) == 1 and modules[0][1] == internals.NO_TASK:
            for tensor in tensors:
                # A tensor with a `grad_fn` is an activation.
                if tensor.grad_fn is None:
                    self._live_storages.classify(tensor, OUTSIDE, INPUT)

    def module_ends(self, module: Any, output: Any) -> None:
        del output
        self._module_stack.module_ends(module)
        thread_state = self._module_stack.thread_state()
        is_outermost = thread_state is not None and len(thread_state.stack) == 1
        if is_outermost and internals.backward_task() == internals.NO_TASK:
            self._model_tensors.find_buckets()

    def optimizer_begins(self, optimizer: Any) -> None:
        if self._module_stack.thread_state() is None:
            return
        self._model_tensors.add_optimizer(optimizer)
        self._model_tensors.repeat_state(optimizer)
        self._module_stack.optimizer_begins(optimizer)

    def optimizer_ends(self, optimizer: Any) -> None:
        if self._module_stack.thread_state() is not None:
            self._model_tensors.add_state(optimizer)
            self._model_tensors.repeat_state(optimizer)
            self._module_stack.optimizer_ends(optimizer)

    def _emit(self, kind: int, layer: int, phase: int, thread_state: ThreadState) -> None:
        key, size = thread_state.inputs if kind == ENTER else (0, 0)
        self._live_storages.events.write_pending()
        self._log.append(
            pack(key, size, self._log.now(), layer, kind, phase, 0, thread_state.number)
        )
        self._log.fold_when_full()

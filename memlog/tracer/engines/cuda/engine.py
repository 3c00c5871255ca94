"""Engine for CUDA and XPU. At the end of the window, it combines the allocator's history with the layers."""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from memlog._internal.diagnostics import Diagnostics
from memlog.trace.cuda_join import ExistingStorage, HistoryJoin, HookMark, label
from memlog.trace.encoding import CLASSIFY, ENTER, GRADIENT, OPTIMIZER_STATE, OUTSIDE, PARAMETER
from memlog.tracer.attribution.module_names import ModuleNames
from memlog.tracer.attribution.module_stack import NO_INPUTS, ThreadState
from memlog.tracer.attribution.parameter_owners import ParameterOwners
from memlog.tracer.engines import allocator_stats
from memlog.tracer.engines.base import EngineReport
from memlog.tracer.engines.cuda.allocator_history import MAX_ENTRIES, AllocatorHistory
from memlog.tracer.engines.hook_engine import HookEngine
from memlog.tracer.event_log import EventLog
from memlog.tracer.tensor_storages import (
    optimizer_tensors,
    parameters_of,
    storage_tensors,
    tensors_in,
)

_UNSEEN = (
    "Memory that does not come from torch's caching allocator (the driver's context, NCCL, cuDNN plans) is "
    "not seen.",
    "Inside a compiled module or a replayed CUDA graph there are no layers: what it allocates counts for "
    "the module that calls it.",
    "A block that the allocator could not split counts with the requested bytes, rounded up to 512, not with "
    "its whole size.",
)


class NativeEngine(HookEngine):
    """Engine that records one window of one device.

    ``readings``: True to read the allocator's statistics at every change of layer, for the fragmentation of
    each layer.
    """

    def __init__(
        self,
        log: EventLog,
        names: ModuleNames,
        diagnostics: Diagnostics,
        history: AllocatorHistory,
        *,
        readings: bool,
    ) -> None:
        super().__init__(log, names, diagnostics)
        self._history = history
        self._device = history.device
        self._owners = ParameterOwners(names)
        self._read = allocator_stats.reader(self._device)
        self._read_always = readings
        self._marks: list[HookMark] = []
        self._existing: list[ExistingStorage] = []
        self._allocated_at_start: int | None = None
        self._started_us = 0
        self._report = EngineReport()

    def start(self, optimizers: Sequence[Any] = ()) -> None:
        self._module_stack.begin()
        self._history.start()
        self._started_us = time.time_ns() // 1000
        if self._read is not None:
            self._allocated_at_start = self._read()[0]
        self._add_roots()
        for optimizer in optimizers:
            self._add_optimizer(optimizer)
        self._hooks.install()

    def stop(self) -> EngineReport:
        """Stop recording, read the history and write the events. A second call is harmless."""
        if self._stopped:
            return self._report
        self._stopped = True
        self._end()
        snapshot = self._history.stop()
        entries = self._history.entries(snapshot, self._started_us)
        join = HistoryJoin(
            self._marks,
            self._existing,
            opening=self._allocated_at_start,
            started_us=self._log.began_us,
            by_time=not self._history.takes_notes,
        )
        for event in join.events(entries):
            self._log.append(event)
            self._log.fold_when_full()
        self._marks = []
        self._report = self._make_report(snapshot, len(entries), join)
        return self._report

    # Calls from hooks.

    def module_begins(self, module: Any, args: Any) -> None:
        thread_state = self._module_stack.thread_state()
        if thread_state is not None:
            thread_state.inputs = self._largest(args)
        super().module_begins(module, args)
        self._add_roots(late=True)

    def optimizer_begins(self, optimizer: Any) -> None:
        for parameter in parameters_of(optimizer):
            if parameter.grad is not None:
                self._classify(parameter.grad, self._owners.of(parameter), GRADIENT)
        self._classify_state(optimizer)
        super().optimizer_begins(optimizer)

    def optimizer_ends(self, optimizer: Any) -> None:
        self._classify_state(optimizer)
        super().optimizer_ends(optimizer)

    def _emit(self, kind: int, layer: int, phase: int, thread_state: ThreadState) -> None:
        reading = None
        if self._read_always and self._read is not None:
            allocated, reserved = self._read()
            reading = (allocated, reserved or 0)
        owner = self._module_stack.owner_until_change(thread_state)
        mark = HookMark(
            self._log.now(),
            kind,
            layer,
            phase,
            thread_state.number,
            owner=owner,
            inputs=thread_state.inputs if kind == ENTER else (0, 0),
            reading=reading,
        )
        self._marks.append(mark)
        # Another thread can append a mark before `len` is called. Then the note names that thread's mark,
        # until this thread makes its next mark.
        self._history.note(label(len(self._marks) - 1))

    # Methods that record the layers and categories of tensors.

    def _add_roots(self, *, late: bool = False) -> None:
        """Record the existing tensors of root modules that were found since the last call.

        ``late``: True if the window is open already. The tensors may then have been allocated within the
        window.
        """
        for tensor, layer, category in self._owners.register_new_roots():
            for address, size in self._blocks(tensor):
                self._existing.append(ExistingStorage(address, size, layer, category))
            if late:
                self._classify(tensor, layer, category)

    def _add_optimizer(self, optimizer: Any) -> None:
        """Record the existing state of an optimizer. Also record parameters that belong to no module."""
        self._existing += [
            ExistingStorage(address, size, self._owners.of_state(state), OPTIMIZER_STATE)
            for state in optimizer_tensors(optimizer)
            for address, size in self._blocks(state.tensor)
        ]
        self._existing += [
            ExistingStorage(address, size, OUTSIDE, PARAMETER)
            for parameter in parameters_of(optimizer)
            if self._owners.of(parameter) == OUTSIDE
            for address, size in self._blocks(parameter)
        ]

    def _classify_state(self, optimizer: Any) -> None:
        for state in optimizer_tensors(optimizer):
            self._classify(state.tensor, self._owners.of_state(state), OPTIMIZER_STATE)

    def _classify(self, tensor: Tensor, layer: int, category: int) -> None:
        now = self._log.now()
        for address, _ in self._blocks(tensor):
            self._marks.append(
                HookMark(now, CLASSIFY, layer, 0, 0, address=address, category=category)
            )

    def _largest(self, args: Any) -> tuple[int, int]:
        """Return the addresses of the two largest storages among a module's arguments.

        If there are fewer than two, 0 stands for each missing one. Return `NO_INPUTS` if no argument is a
        tensor.
        """
        tensors = tensors_in(args)
        if not tensors:
            return NO_INPUTS
        found = dict(block for tensor in tensors for block in self._blocks(tensor))
        first, second, *_ = [*sorted(found, key=lambda address: -found[address]), 0, 0]
        return first, second

    def _blocks(self, tensor: Tensor) -> list[tuple[int, int]]:
        return [
            (storage.data_ptr(), storage.nbytes())
            for storage in (plain.untyped_storage() for plain in storage_tensors(tensor))
            if storage.device == self._device and storage.nbytes()
        ]

    def _make_report(self, snapshot: Any, entries: int, join: HistoryJoin) -> EngineReport:
        found, reason = allocator_stats.fragmentation(self._device, snapshot)
        dropped: dict[str, int] = {}
        if entries >= MAX_ENTRIES:
            dropped["history ring was full: the window's first events are missing"] = 1
        if join.unattributed:
            dropped["backward allocations without a layer"] = join.unattributed
        unseen: tuple[str, ...] = _UNSEEN
        if not self._history.takes_notes:
            unseen += (
                f"torch {torch.__version__} attaches no notes to this device's history: layers are found by "
                "time, so an allocation within a microsecond of a change may count for the wrong layer.",
            )
        return EngineReport(unseen, found, reason, dropped)

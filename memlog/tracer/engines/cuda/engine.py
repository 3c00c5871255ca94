"""Engine for CUDA and XPU. At the end of the window, it combines the allocator's history with the layers."""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

from memlog._internal.diagnostics import Diagnostics
from memlog.trace.allocator_blocks import live_blocks, unsplit_bytes
from memlog.trace.cuda_join import NO_EVENT, ExistingStorage, HistoryJoin, HookMark, label
from memlog.trace.encoding import (
    CLASSIFY,
    ENTER,
    FORWARD,
    GRADIENT,
    OPTIMIZER_STATE,
    OUTSIDE,
    PARAMETER,
    UNDECIDED,
    WORKSPACE,
)
from memlog.tracer.attribution.module_names import ModuleNames
from memlog.tracer.attribution.module_stack import NO_INPUTS, ThreadState
from memlog.tracer.attribution.owners import ParameterOwners
from memlog.tracer.engines import base
from memlog.tracer.engines.base import EngineReport, HookEngine
from memlog.tracer.engines.cuda import allocator_history
from memlog.tracer.engines.cuda.allocator_history import MAX_ENTRIES, AllocatorHistory
from memlog.tracer.engines.wrappers import WrapperMemory, bucket_sizes
from memlog.tracer.event_log import EventLog
from memlog.tracer.tensor_storages import (
    has_bytes,
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
        self._read = base.reader(self._device)
        self._read_always = readings
        self._marks: list[HookMark] = []
        self._first_number = AllocatorHistory.next_number
        self._existing: list[ExistingStorage] = []
        self._allocated_at_start: int | None = None
        self._workspaces_unknown = False
        self._wrappers = WrapperMemory(self._made_as)
        self._started_us = 0
        self._report = EngineReport()

    def start(self, optimizers: Sequence[Any] = ()) -> None:
        self._module_stack.begin()
        self._history.start()
        self._started_us = time.time_ns() // 1000
        if self._read is not None:
            self._allocated_at_start = self._read()[0]
        self._find_workspaces()
        self._existing += self._tensors_of_new_roots()
        for optimizer in optimizers:
            self._add_optimizer(optimizer)
        self._add_marks(HookMark(self._log.now(), NO_EVENT, OUTSIDE, FORWARD, 0))
        self._hooks.install()
        self._wrappers.begin()

    @property
    def lost(self) -> bool:
        """True if the window's events can't be read, because the program has taken the history over."""
        return self._history.taken_over and not self._history.read_users

    def stop(self) -> EngineReport:
        """Stop recording, read the history and write the events. A second call is harmless."""
        if self._stopped:
            return self._report
        self._stopped = True
        self._end()
        self._wrappers.end()
        snapshot = self._history.stop()
        entries = self._history.entries(snapshot, self._started_us)
        join = HistoryJoin(
            self._marks,
            self._existing,
            first_number=self._first_number,
            blocks=live_blocks(snapshot, self._device.index or 0),
            workspaces=self._find_workspaces(),
            buckets=bucket_sizes(root.module() for root in self._names.roots),
            unsplit=unsplit_bytes(entries, snapshot, self._device.index or 0),
            opening=self._allocated_at_start,
            started_us=self._log.began_us,
            by_time=not self._history.takes_notes,
        )
        for event in join.events(entries):
            self._log.append(event)
            self._log.fold_when_full()
        AllocatorHistory.next_number = self._first_number + len(self._marks)
        self._marks = []
        self._report = self._make_report(snapshot, len(entries))
        return self._report

    # Calls from hooks.

    def module_begins(self, module: Any, args: Any) -> None:
        thread_state = self._module_stack.thread_state()
        if thread_state is not None:
            thread_state.inputs = self._largest(args)
        super().module_begins(module, args)
        self._classify(self._tensors_of_new_roots())

    def optimizer_begins(self, optimizer: Any) -> None:
        for parameter in parameters_of(optimizer):
            layer = self._owners.of(parameter)
            if layer == OUTSIDE:
                self._classify(self._storages(parameter, layer, PARAMETER))
            if parameter.grad is not None:
                self._classify(self._storages(parameter.grad, layer, GRADIENT))
        self._classify(self._state_of(optimizer))
        super().optimizer_begins(optimizer)

    def optimizer_ends(self, optimizer: Any) -> None:
        self._classify(self._state_of(optimizer))
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
        self._add_marks(mark)

    def _add_marks(self, *marks: HookMark) -> None:
        """Add marks, and attach the number of the last one to this thread's later allocations and frees."""
        self._marks += marks
        # Another thread can append a mark before `len` is called. Then the note names that thread's mark,
        # until this thread makes its next mark.
        self._history.note(label(self._first_number + len(self._marks) - 1))

    @contextmanager
    def _made_as(self, category: int) -> Iterator[None]:
        """Inside the block, put this thread's new storages into a category."""
        thread_state = self._module_stack.thread_state(join=True)
        if thread_state is None:
            yield
            return
        owner = self._module_stack.owner_until_change(thread_state)
        now, thread = self._log.now(), thread_state.number
        inside = HookMark(now, NO_EVENT, OUTSIDE, FORWARD, thread, owner=owner, category=category)
        self._add_marks(inside)
        try:
            yield
        finally:
            self._add_marks(inside._replace(time_ns=self._log.now(), category=UNDECIDED))

    # Methods that record the layers and categories of tensors.

    def _tensors_of_new_roots(self) -> list[ExistingStorage]:
        """Return the storages of the root modules that were found since the last call."""
        return [
            storage
            for tensor, layer, category in self._owners.register_new_roots()
            for storage in self._storages(tensor, layer, category)
        ]

    def _add_optimizer(self, optimizer: Any) -> None:
        """Record the existing state of an optimizer. Also record parameters that belong to no module."""
        self._existing += self._state_of(optimizer)
        for parameter in parameters_of(optimizer):
            if self._owners.of(parameter) == OUTSIDE:
                self._existing += self._storages(parameter, OUTSIDE, PARAMETER)

    def _state_of(self, optimizer: Any) -> list[ExistingStorage]:
        return [
            storage
            for state in optimizer_tensors(optimizer)
            for storage in self._storages(
                state.tensor, self._owners.of_state(state), OPTIMIZER_STATE
            )
        ]

    def _find_workspaces(self) -> set[int]:
        """Return the addresses of cuBLAS's workspaces. Record them as existing, if they are older."""
        try:
            found = allocator_history.addresses(self._device)
        except allocator_history.UnknownWorkspacesError:
            self._workspaces_unknown = True
            return set()
        self._existing += [ExistingStorage(address, 0, OUTSIDE, WORKSPACE) for address in found]
        return found

    def _classify(self, storages: Sequence[ExistingStorage]) -> None:
        """Record the layers and categories that storages have from now on."""
        thread_state = self._module_stack.thread_state()
        if not storages or thread_state is None:
            return
        now, owner = self._log.now(), self._module_stack.owner_until_change(thread_state)
        self._add_marks(
            *(
                HookMark(
                    now,
                    CLASSIFY,
                    storage.layer,
                    0,
                    thread_state.number,
                    owner=owner,
                    address=storage.address,
                    size=storage.size,
                    category=storage.category,
                )
                for storage in storages
            )
        )

    def _largest(self, args: Any) -> tuple[int, int]:
        """Return the addresses of the two largest storages among a module's arguments.

        If there are fewer than two, 0 stands for each missing one. Return `NO_INPUTS` if no argument is a
        tensor.
        """
        tensors = tensors_in(args)
        if not tensors:
            return NO_INPUTS
        found = {
            storage.address: storage.size
            for tensor in tensors
            for storage in self._storages(tensor, OUTSIDE, UNDECIDED)
        }
        first, second, *_ = [*sorted(found, key=lambda address: -found[address]), 0, 0]
        return first, second

    def _storages(self, tensor: Tensor, layer: int, category: int) -> list[ExistingStorage]:
        """Return the storages of a tensor that are on the traced device."""
        storages = (plain.untyped_storage() for plain in storage_tensors(tensor))
        return [
            ExistingStorage(storage.data_ptr(), storage.nbytes(), layer, category)
            for storage in storages
            if storage.device == self._device and storage.nbytes() and has_bytes(storage)
        ]

    def _make_report(self, snapshot: Any, entries: int) -> EngineReport:
        found, reason = base.fragmentation(self._device, snapshot)
        dropped: dict[str, int] = {}
        if entries >= MAX_ENTRIES:
            dropped["history ring was full: the window's first events are missing"] = 1
        unseen: tuple[str, ...] = _UNSEEN
        if not self._history.takes_notes:
            unseen += (
                f"torch {torch.__version__} attaches no notes to this device's history: layers are found by "
                "time, so an allocation within a microsecond of a change may count for the wrong layer.",
            )
        if self._workspaces_unknown:
            unseen += (
                "The workspaces of cuBLAS can't be told from tensors here: they count for the layer that "
                "multiplied matrices first.",
            )
        return EngineReport(unseen, found, reason, dropped)

"""Engine for CUDA and XPU. At the end of the window, it combines the allocator's history with the layers.

torch makes a workspace when a thread multiplies matrices on a stream for the first time, and keeps the
workspace until the process ends. By its size alone, a workspace can't be told from a tensor: on Hopper it has
32 MiB, as activations often have. torch keeps the workspaces in two C++ tables (CublasHandlePool.cpp) that
Python can't reach. So memlog reads these tables in the process's own memory. A damaged read does no harm: a
read through ``/proc/self/mem`` can't crash, and `HistoryJoin` ignores each address that is no block in use.
"""

from __future__ import annotations

import ctypes
import functools
import inspect
import os
import struct
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from memlog._internal.diagnostics import Diagnostics
from memlog.torchside.loaded import records_history
from memlog.trace.cuda_join import (
    NO_EVENT,
    ExistingStorage,
    HistoryJoin,
    HookMark,
    label,
    live_blocks,
    unsplit_bytes,
)
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
from memlog.tracer.engines import base
from memlog.tracer.engines.base import EngineReport, HookEngine
from memlog.tracer.engines.storage_events import EventLog
from memlog.tracer.module_names import ModuleNames
from memlog.tracer.module_stack import NO_INPUTS, ThreadState
from memlog.tracer.owners import ParameterOwners, WrapperMemory, bucket_sizes
from memlog.tracer.tensor_storages import (
    has_bytes,
    optimizer_tensors,
    parameters_of,
    storage_tensors,
    tensors_in,
)

MAX_ENTRIES = 131_072
"""Maximum number of entries in each device's history (136 bytes each). Beyond the maximum, new entries
replace the oldest ones. torch's default has no limit."""


_reader: AllocatorHistory | None = None
"""The object that attaches notes now. The notes of two would be mistaken for each other's."""


class AllocatorHistory:
    """History of the allocator of one CUDA or XPU device.

    If the user's program has turned the history on, memlog neither turns it off nor clears it. memlog
    attaches notes to the entries. torch can only return the whole history, with its stacks: this takes
    4 to 80 µs an entry, and has no limit, because a user's history may have millions of entries.

    If the program turns the history on while memlog records one, the history is the program's from then on.

    Args:
        device: Device with an index, such as ``cuda:0``.
        read_users: False if a history that the user's program records would take too long to read.

    Attributes:
        taken_over: True if the program has turned the history on, or off, since `start`.
        takes_notes: True if this torch can attach notes to entries.
        next_number: First number that no trace of this process has written in a note.
    """

    next_number = 0

    def __init__(self, device: torch.device, *, read_users: bool = True) -> None:
        self.device = device
        self.taken_over = False
        self.read_users = read_users
        self._memory: Any = getattr(torch, device.type).memory
        self._set_note = getattr(self._memory, "_set_memory_metadata", None)
        self._enabled_here = False
        self._record: Any = None
        self._users: Any = None
        self.takes_notes = self._set_note is not None

    def refusal(self) -> str | None:
        """Return why the history can't be used now; ``None`` if it can."""
        kind = self.device.type
        module: Any = getattr(torch, kind)
        for needed in ("_record_memory_history", "_snapshot"):
            if not hasattr(self._memory, needed):
                return f"torch {torch.__version__} has no torch.{kind}.memory.{needed}"
        if not module.is_initialized():
            return f"{kind} is not initialised yet"
        backend = getattr(self._memory, "get_allocator_backend", None)
        if backend is not None and backend() != "native":
            return f"the allocator is {backend()}, which keeps no history"
        return self._use_by_others()

    def _use_by_others(self) -> str | None:
        if _reader is not None:
            return "another trace of memlog is reading the allocator's history"
        if self._is_on() and not self.read_users:
            return (
                "the program records a memory history of its own, which takes too long to read in a "
                "training step"
            )
        get_note = getattr(self._memory, "_get_memory_metadata", None)
        if get_note is not None and get_note():
            return "the program attaches memory metadata of its own"
        return None

    def start(self) -> None:
        """Turn the history on if it is off."""
        global _reader  # noqa: PLW0603 - the history belongs to the process
        _reader = self
        if self._is_on():
            return
        wanted = {
            "context": None,
            "stacks": "python",
            "max_entries": MAX_ENTRIES,
            "clear_history": True,
            "skip_actions": ["free_completed"],
        }
        record = self._memory._record_memory_history
        # Older torch does not take all of these arguments.
        taken = inspect.signature(
            getattr(self._memory, "_record_memory_history_impl", record)
        ).parameters
        record("all", **{name: value for name, value in wanted.items() if name in taken})
        self._enabled_here = True

        def users(*args: Any, **kwargs: Any) -> Any:
            self._memory._record_memory_history = record
            self.taken_over = True
            return record(*args, **kwargs)

        self._memory._record_memory_history = users
        self._record, self._users = record, users

    def _is_on(self) -> bool:
        return records_history(torch, self.device.type)

    def note(self, text: str) -> None:
        """Attach ``text`` to the entries that this thread makes from now on."""
        if self._set_note is not None:
            self._set_note(text)

    def stop(self) -> Any:
        """Return torch's snapshot. Turn the history off if this object turned it on.

        The snapshot is empty if it would contain the history of the program, and must not be read.
        """
        global _reader  # noqa: PLW0603
        try:
            self.note("")
            return {} if self.taken_over and not self.read_users else self._memory._snapshot()
        finally:
            if _reader is self:
                _reader = None
            if self._enabled_here:
                self._enabled_here = False
                # The program may have replaced this function, too.
                if self._memory._record_memory_history is self._users:
                    self._memory._record_memory_history = self._record
                if not self.taken_over:
                    self._record(enabled=None)

    def entries(self, snapshot: Any, since_us: int) -> list[Any]:
        """Return this device's entries since ``since_us``, a Unix time in microseconds."""
        traces = snapshot.get("device_traces", [])
        index = self.device.index or 0
        trace = traces[index] if index < len(traces) else []
        return [entry for entry in trace if entry.get("time_us", since_us) >= since_us]


_TABLES = (
    "_ZN2at4cuda33cublas_handle_stream_to_workspaceEv",
    "_ZN2at4cuda35cublaslt_handle_stream_to_workspaceEv",
)
"""C++ names of the functions that return a table by reference. A table is, or begins with, a
``std::map<std::tuple<void*, void*>, at::DataPtr>``."""
_HEADER = struct.Struct("@8xi4xPPPN")
"""``std::map`` of libstdc++: comparison, colour, root, first and last node, number of nodes."""
_NODE = struct.Struct("@i4xPPPPPP")
"""A node of the map: colour, parent, left, right, the two parts of the key, and the workspace's address."""
_MOST = 4096
"""Maximum number of workspaces in a table. A higher number means that the table is not as described above."""


class UnknownWorkspacesError(Exception):
    """This torch does not let memlog find the workspaces."""


def addresses(device: torch.device) -> set[int]:
    """Return the addresses of all workspaces, of all devices. Return an empty set if ``device`` is no GPU.

    Raises:
        UnknownWorkspacesError: The workspaces can't be found.
    """
    if device.type != "cuda":
        return set()
    try:
        memory = os.open("/proc/self/mem", os.O_RDONLY)
    except OSError as error:
        raise UnknownWorkspacesError from error
    try:
        return {address for table in _tables() for address in _workspaces_in(memory, table())}
    except (OSError, OverflowError, struct.error) as error:
        raise UnknownWorkspacesError from error
    finally:
        os.close(memory)


@functools.cache
def _tables() -> tuple[Callable[[], int], ...]:
    path = Path(torch.__file__).parent / "lib" / "libtorch_cuda.so"
    try:
        # `RTLD_NOLOAD` returns the library if torch has loaded it, and never loads it.
        library = ctypes.CDLL(str(path), mode=os.RTLD_NOLOAD | os.RTLD_NOW)
        functions = [getattr(library, name) for name in _TABLES if hasattr(library, name)]
    except OSError:
        functions = []
    if not functions:
        raise UnknownWorkspacesError
    # By default, ctypes returns an int, which would cut the pointer to 32 bits.
    for function in functions:
        function.restype = ctypes.c_void_p
    return tuple(functions)


def _workspaces_in(memory: int, table: int) -> list[int]:
    _, root, _, _, count = _HEADER.unpack(os.pread(memory, _HEADER.size, table))
    if count > _MOST:
        raise UnknownWorkspacesError
    workspaces: list[int] = []
    waiting = [root]
    # The count ends the walk even if a damaged read leads in a circle.
    while waiting and len(workspaces) < count:
        node = waiting.pop()
        if node:
            _, _, left, right, _, _, address = _NODE.unpack(os.pread(memory, _NODE.size, node))
            workspaces.append(address)
            waiting += [left, right]
    return workspaces


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
        # A history that the program records keeps the notes of this trace, so the next trace uses other
        # numbers.
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
            # The parameters of modules are classified with their modules.
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
            workspaces = addresses(self._device)
        except UnknownWorkspacesError:
            self._workspaces_unknown = True
            return set()
        self._existing += [
            ExistingStorage(address, 0, OUTSIDE, WORKSPACE) for address in workspaces
        ]
        return workspaces

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
        sizes = {
            storage.address: storage.size
            for tensor in tensors
            for storage in self._storages(tensor, OUTSIDE, UNDECIDED)
        }
        first, second, *_ = [*sorted(sizes, key=lambda address: -sizes[address]), 0, 0]
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
        fragmentation, reason = base.fragmentation(self._device, snapshot)
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
        return EngineReport(unseen, fragmentation, reason, dropped)

"""Allocator history of a device, and the workspaces of cuBLAS in it.

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
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from memlog.probes.allocators import records_history

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
                if self._memory._record_memory_history is self._users:
                    self._memory._record_memory_history = self._record
                if not self.taken_over:
                    self._record(enabled=None)

    def entries(self, snapshot: Any, since_us: int) -> list[Any]:
        """Return this device's entries since ``since_us``, a Unix time in microseconds."""
        traces = snapshot.get("device_traces", [])
        index = self.device.index or 0
        found = traces[index] if index < len(traces) else []
        return [entry for entry in found if entry.get("time_us", since_us) >= since_us]


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
        return {found for table in _tables() for found in _workspaces_in(memory, table())}
    except (OSError, OverflowError, struct.error) as error:
        raise UnknownWorkspacesError from error
    finally:
        os.close(memory)


@functools.cache
def _tables() -> tuple[Callable[[], int], ...]:
    path = Path(torch.__file__).parent / "lib" / "libtorch_cuda.so"
    try:
        library = ctypes.CDLL(str(path), mode=os.RTLD_NOLOAD | os.RTLD_NOW)
        functions = [getattr(library, name) for name in _TABLES if hasattr(library, name)]
    except OSError:
        functions = []
    if not functions:
        raise UnknownWorkspacesError
    for function in functions:
        function.restype = ctypes.c_void_p
    return tuple(functions)


def _workspaces_in(memory: int, table: int) -> list[int]:
    _, root, _, _, count = _HEADER.unpack(os.pread(memory, _HEADER.size, table))
    if count > _MOST:
        raise UnknownWorkspacesError
    found: list[int] = []
    waiting = [root]
    while waiting and len(found) < count:
        node = waiting.pop()
        if node:
            _, _, left, right, _, _, address = _NODE.unpack(os.pread(memory, _NODE.size, node))
            found.append(address)
            waiting += [left, right]
    return found

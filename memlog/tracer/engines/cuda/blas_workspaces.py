"""Workspaces of cuBLAS: memory that torch takes from its allocator and that no tensor owns.

torch makes a workspace when a thread multiplies matrices on a stream for the first time, and keeps the
workspace until the process ends. By its size alone, a workspace can't be told from a tensor: on Hopper it has
32 MiB, as activations often have. torch keeps the workspaces in two C++ tables (CublasHandlePool.cpp) that
Python can't reach. So memlog reads these tables in the process's own memory. A damaged read does no harm: a
read through ``/proc/self/mem`` can't crash, and `HistoryJoin` ignores each address that is no block in use.
"""

from __future__ import annotations

import ctypes
import functools
import os
import struct
from collections.abc import Callable
from pathlib import Path

import torch

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

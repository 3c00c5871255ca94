"""Memory in use on a whole NVIDIA device, by all processes, from the driver's library (NVML).

The helper process calls NVML. NVML needs no CUDA context, waits for no kernel, and initialises nothing in the
trainer. The trainer calls NVML only after an allocation on a device has failed. torch does the same then.
memlog calls NVML through ctypes: four calls don't justify a dependency that most installations of memlog do
not need. Structures and names are those of ``nvml.h``.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from typing import Any, NamedTuple, TypeVar

from memlog._internal.diagnostics import Diagnostics

_T = TypeVar("_T")

LIBRARY = "libnvidia-ml.so.1"
_MOST_OVER_CAPACITY = 1.1
"""Maximum ratio of NVML's total bytes to CUDA's for the same device. Only NVML's total includes the memory
that the driver keeps. A larger ratio means that NVML found another device, such as the whole GPU instead of
its MIG instance."""


class _Memory(ctypes.Structure):
    """NVML's structure ``nvmlMemory_t``."""

    _fields_ = (
        ("total", ctypes.c_ulonglong),
        ("free", ctypes.c_ulonglong),
        ("used", ctypes.c_ulonglong),
    )


class _Process(ctypes.Structure):
    """NVML's structure ``nvmlProcessInfo_t`` of ``nvmlDeviceGetComputeRunningProcesses_v3``."""

    _fields_ = (
        ("pid", ctypes.c_uint),
        ("used", ctypes.c_ulonglong),
        ("gpu_instance", ctypes.c_uint),
        ("compute_instance", ctypes.c_uint),
    )


_UNKNOWN = 2**64 - 1
"""NVML's ``NVML_VALUE_NOT_AVAILABLE``."""
_MOST_PROCESSES = 64


class ProcessUse(NamedTuple):
    """Process that computes on a device."""

    pid: int
    """Process id, as the machine's own processes see it. It is another one inside a container."""
    used: int | None
    """Bytes that the process uses on the device, with its CUDA context; ``None``: unknown."""


class Nvml:
    """Reader of the memory of NVIDIA devices. No method raises.

    ``load`` loads NVML's library, or raises OSError. ``diagnostics`` counts all other exceptions.
    """

    def __init__(self, diagnostics: Diagnostics, load: Callable[[str], Any] = ctypes.CDLL) -> None:
        self._diagnostics = diagnostics
        self._load = load
        self._library: Any = None
        self._is_missing = False
        self._handles: dict[str, ctypes.c_void_p] = {}

    def read(self, uuid: str, capacity: int | None) -> int | None:
        """Return the bytes in use on a device, by all processes and the driver; ``None`` if unknown.

        Args:
            uuid: The device's UUID in CUDA; for a MIG instance, the UUID of the instance.
            capacity: Total bytes of the device in CUDA, to check that NVML finds the same device. If it is
                ``None`` (unknown), nothing is read.
        """
        if capacity is None:
            return None
        memory = self._contained(lambda: self._memory(uuid))
        if memory is None or not capacity <= memory.total <= capacity * _MOST_OVER_CAPACITY:
            return None
        return int(memory.used)

    def processes(self, uuid: str) -> list[ProcessUse]:
        """Return the processes that compute on a device; empty if unknown. ``uuid`` is as in `read`."""
        return self._contained(lambda: self._processes(uuid)) or []

    def _contained(self, read: Callable[[], _T | None]) -> _T | None:
        if self._is_missing:
            return None
        try:
            self._initialise()
            return read()
        except OSError:
            self._is_missing = True
        except Exception as error:  # noqa: BLE001 - an unreadable number must not end the helper
            self._diagnostics.fault("reading NVML", error)
        return None

    def _initialise(self) -> None:
        if self._library is None:
            library = self._load(LIBRARY)
            if library.nvmlInit_v2() != 0:
                raise OSError(f"{LIBRARY} can't be initialised")
            self._library = library

    def _processes(self, uuid: str) -> list[ProcessUse] | None:
        handle = self._handle(uuid)
        count, found = ctypes.c_uint(_MOST_PROCESSES), (_Process * _MOST_PROCESSES)()
        # Drivers before release 510 lack this version of the function.
        list_processes = getattr(self._library, "nvmlDeviceGetComputeRunningProcesses_v3", None)
        if handle is None or list_processes is None:
            return None
        if list_processes(handle, ctypes.byref(count), found):
            return None
        return [
            ProcessUse(int(each.pid), None if each.used == _UNKNOWN else int(each.used))
            for each in found[: count.value]
        ]

    def _memory(self, uuid: str) -> _Memory | None:
        handle = self._handle(uuid)
        memory = _Memory()
        if handle is None or self._library.nvmlDeviceGetMemoryInfo(handle, ctypes.byref(memory)):
            return None
        return memory

    def _handle(self, uuid: str) -> ctypes.c_void_p | None:
        """Return NVML's handle of a device; ``None`` if NVML does not find the device.

        NVML's name of a device is the UUID of CUDA with a prefix.
        """
        if uuid not in self._handles:
            for prefix in ("MIG-", "GPU-"):
                handle = ctypes.c_void_p()
                name = f"{prefix}{uuid}".encode()
                if self._library.nvmlDeviceGetHandleByUUID(name, ctypes.byref(handle)) == 0:
                    self._handles[uuid] = handle
                    break
        return self._handles.get(uuid)


_NAME_BYTES = 96
"""NVML's ``NVML_DEVICE_NAME_V2_BUFFER_SIZE``."""


class NvidiaDevice(NamedTuple):
    name: str
    memory: int | None
    """Total bytes; ``None``: unknown, as for a device that shares the host's memory."""


class NvidiaDriver(NamedTuple):
    version: str
    cuda: tuple[int, int]
    """Newest version of CUDA that the driver supports: major and minor number."""
    devices: list[NvidiaDevice]


def read_driver(load: Callable[[str], Any] = ctypes.CDLL) -> NvidiaDriver | None:
    """Return the driver and all devices of the machine, also those that ``CUDA_VISIBLE_DEVICES`` hides.

    ``None``: the machine has no NVIDIA driver, or the driver doesn't work.
    """
    try:
        library = load(LIBRARY)
    except OSError:
        return None
    version, cuda, count = (
        ctypes.create_string_buffer(_NAME_BYTES),
        ctypes.c_int(),
        ctypes.c_uint(),
    )
    calls = (
        library.nvmlInit_v2(),
        library.nvmlSystemGetDriverVersion(version, _NAME_BYTES),
        library.nvmlSystemGetCudaDriverVersion_v2(ctypes.byref(cuda)),
        library.nvmlDeviceGetCount_v2(ctypes.byref(count)),
    )
    if any(calls):
        return None
    devices = [_device(library, index) for index in range(count.value)]
    thousands, rest = divmod(cuda.value, 1000)
    return NvidiaDriver(version.value.decode("utf-8", "replace"), (thousands, rest // 10), devices)


def _device(library: Any, index: int) -> NvidiaDevice:
    handle, name, memory = ctypes.c_void_p(), ctypes.create_string_buffer(_NAME_BYTES), _Memory()
    library.nvmlDeviceGetHandleByIndex_v2(index, ctypes.byref(handle))
    library.nvmlDeviceGetName(handle, name, _NAME_BYTES)
    unknown = library.nvmlDeviceGetMemoryInfo(handle, ctypes.byref(memory))
    return NvidiaDevice(
        name.value.decode("utf-8", "replace") or "unknown device",
        None if unknown else int(memory.total),
    )

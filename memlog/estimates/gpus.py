"""The GPU for which a step is estimated: named by the user, found in this machine, or an A100."""

from __future__ import annotations

import ctypes
import re
from typing import Any, Final, Literal

import torch

from memlog.errors import ConfigurationError
from memlog.estimates.cuda_kernels.reductions import A100, Gpu
from memlog.probes.nvml import LIBRARY

_OLDER, _LATER, _SMALL = 1024, 2048, 1536
"""Threads of a multiprocessor, by generation (CUDA C++ Programming Guide, "Technical Specifications per
Compute Capability")."""

_GPUS: Final = (
    Gpu("T4", (7, 5), 40, _OLDER),
    Gpu("RTX 2080 Ti", (7, 5), 68, _OLDER),
    A100,
    Gpu("A30", (8, 0), 56, _LATER),
    Gpu("A10", (8, 6), 72, _SMALL),
    Gpu("A10G", (8, 6), 80, _SMALL),
    Gpu("A40", (8, 6), 84, _SMALL),
    Gpu("RTX A5000", (8, 6), 64, _SMALL),
    Gpu("RTX A6000", (8, 6), 84, _SMALL),
    Gpu("RTX 3060", (8, 6), 28, _SMALL),
    Gpu("RTX 3080", (8, 6), 68, _SMALL),
    Gpu("RTX 3090", (8, 6), 82, _SMALL),
    Gpu("L4", (8, 9), 58, _SMALL),
    Gpu("L40", (8, 9), 142, _SMALL),
    Gpu("L40S", (8, 9), 142, _SMALL),
    Gpu("RTX 4070", (8, 9), 46, _SMALL),
    Gpu("RTX 4080", (8, 9), 76, _SMALL),
    Gpu("RTX 4090", (8, 9), 128, _SMALL),
    Gpu("RTX 6000 Ada", (8, 9), 142, _SMALL),
    Gpu("H100", (9, 0), 132, _LATER),
    Gpu("H100 PCIe", (9, 0), 114, _LATER),
    Gpu("H200", (9, 0), 132, _LATER),
    Gpu("GH200", (9, 0), 132, _LATER),
    Gpu("B200", (10, 0), 148, _LATER),
    Gpu("GB200", (10, 0), 148, _LATER),
    Gpu("RTX 5080", (12, 0), 84, _SMALL),
    Gpu("RTX 5090", (12, 0), 170, _SMALL),
)
_NAME_BYTES: Final = 96


def chosen(device: str) -> tuple[Literal["cuda", "cpu"], Gpu]:
    """Return the type of a device and the GPU that its name stands for.

    ``"cuda"`` stands for this machine's GPU, or for an A100 if there is none or its properties are unknown.

    Raises:
        ConfigurationError: ``device`` is neither ``"cuda"``, ``"cpu"`` nor the name of a known GPU.
    """
    if device == "cpu":
        return "cpu", A100
    if device == "cuda":
        return "cuda", of_this_machine() or A100
    known = named(device)
    if known is None:
        names = ", ".join(gpu.name for gpu in _GPUS)
        raise ConfigurationError(
            f"device={device!r}: write 'cuda' or 'cpu', or the name of a GPU: {names}"
        )
    return "cuda", known


def named(name: str) -> Gpu | None:
    """Return the GPU of a name such as ``H100`` or ``NVIDIA A100-SXM4-80GB``; ``None`` if it is unknown."""
    words = _words(name)
    matches = [gpu for gpu in _GPUS if _contains(words, _words(gpu.name))]
    # "H100 PCIe" also contains "H100". The longest name is the exact one.
    return max(matches, key=lambda gpu: len(gpu.name), default=None)


def _words(name: str) -> list[str]:
    return re.split(r"[^a-z0-9]+", name.lower())


def _contains(words: list[str], part: list[str]) -> bool:
    return any(words[at : at + len(part)] == part for at in range(len(words)))


def of_this_machine() -> Gpu | None:
    """Return this machine's GPU; ``None`` if there is none, there are several kinds, or it is unknown.

    The properties are read through CUDA only if the program uses CUDA already. Otherwise, CUDA would be
    initialised, and the program could no longer fork.
    """
    if torch.cuda.is_initialized():
        properties: Any = torch.cuda.get_device_properties(torch.cuda.current_device())
        return Gpu(
            properties.name,
            (properties.major, properties.minor),
            properties.multi_processor_count,
            properties.max_threads_per_multi_processor,
        )
    names = _installed()
    return named(names.pop()) if len(names) == 1 else None


def _installed() -> set[str]:
    """Return the names of this machine's GPUs in NVML."""
    try:
        library: Any = ctypes.CDLL(LIBRARY)
    except OSError:
        return set()
    if library.nvmlInit_v2() != 0:
        return set()
    count = ctypes.c_uint()
    library.nvmlDeviceGetCount_v2(ctypes.byref(count))
    names = set()
    for at in range(count.value):
        handle, name = ctypes.c_void_p(), ctypes.create_string_buffer(_NAME_BYTES)
        if library.nvmlDeviceGetHandleByIndex_v2(at, ctypes.byref(handle)) == 0:
            library.nvmlDeviceGetName(handle, name, _NAME_BYTES)
            names.add(name.value.decode(errors="replace"))
    library.nvmlShutdown()
    return names

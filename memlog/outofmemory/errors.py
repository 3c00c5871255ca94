"""Which exceptions mean that memory ran out, and what they tell."""

from __future__ import annotations

import re
import sys
from types import ModuleType

from memlog.events import OutOfMemory, now_us
from memlog.outofmemory.frames import where
from memlog.outofmemory.limits import host_room
from memlog.redact import without_credentials

_MAX_MESSAGE = 300
_CPU_ALLOCATOR = re.compile(
    r"DefaultCPUAllocator: (?:can't allocate|not enough) memory"
    r"(?:: you tried to allocate (?P<bytes>\d+) bytes)?"
)
"""Of torch's allocator for the CPU, which raises a plain RuntimeError."""
_TRIED = re.compile(r"Tried to allocate (?P<size>[\d.]+) (?P<unit>bytes|KiB|MiB|GiB)")
_FREE = re.compile(r"of which (?P<size>[\d.]+) (?P<unit>bytes|KiB|MiB|GiB) is free")
_DEVICE = re.compile(r"\b(?P<kind>GPU|CUDA|XPU|MPS)\b(?: device)? ?(?P<index>\d+)?")
_UNITS = {"bytes": 1, "KiB": 1024, "MiB": 1024**2, "GiB": 1024**3}


def is_out_of_memory(error: BaseException | None) -> bool:
    """Whether ``error`` says that an allocation failed, on the host or on a device."""
    if isinstance(error, MemoryError):
        return True
    return _is_torchs(error) or (
        isinstance(error, RuntimeError) and _CPU_ALLOCATOR.search(str(error)) is not None
    )


def describe(error: BaseException, step: int | None) -> OutOfMemory:
    """The event of an exception for which `is_out_of_memory` holds.

    Args:
        error: The exception, with its traceback.
        step: The last step that was over.
    """
    message = str(error).partition("\n")[0] or type(error).__name__
    layer, phase = where(error)
    device = _device(message) if _is_torchs(error) else "host"
    room = host_room() if device == "host" else None
    free = room.free if room else _size(_FREE.search(message))
    return OutOfMemory(
        time_us=now_us(),
        step=step,
        device=device,
        requested=_requested(message),
        free=free,
        limit=room.limit if room else None,
        limited_by=room.limited_by if room else None,
        allocated=room.used if room else None,
        reserved=None,
        layer=layer,
        phase=phase,
        message=without_credentials(message[:_MAX_MESSAGE]),
    )


def _is_torchs(error: BaseException | None) -> bool:
    """Whether it is ``torch.OutOfMemoryError``: a device's."""
    torch: ModuleType | None = sys.modules.get("torch")
    kind = getattr(torch, "OutOfMemoryError", None)
    return isinstance(kind, type) and isinstance(error, kind)


def _device(message: str) -> str:
    found = _DEVICE.search(message)
    if found is None:
        return "device"
    kind = {"GPU": "cuda"}.get(found["kind"], found["kind"].lower())
    return f"{kind}{found['index'] or 0}"


def _requested(message: str) -> int | None:
    found = _CPU_ALLOCATOR.search(message)
    if found is not None:
        return int(found["bytes"]) if found["bytes"] else None
    return _size(_TRIED.search(message))


def _size(found: re.Match[str] | None) -> int | None:
    return None if found is None else round(float(found["size"]) * _UNITS[found["unit"]])

"""Recognition of exceptions that report a failed allocation, and description of the failure."""

from __future__ import annotations

import errno
import re
import sys
from collections import deque
from traceback import walk_tb

from memlog._internal.redact import without_credentials
from memlog.events import OutOfMemory, now_us
from memlog.inputs.step_inputs import inputs_of_failure
from memlog.oom.frames import locate
from memlog.oom.limits import UNKNOWN_HEADROOM, highest_resident, host_headroom
from memlog.probes.malloc import read_heap
from memlog.probes.tree import machine_memory

_MAX_MESSAGE = 300
_MAX_LOOKED_AT = 10_000
"""Number of characters of a message that are searched for passwords. Later characters are never shown."""
_UNITS: dict[str, int] = {
    unit: 1024**power for power, unit in enumerate(("bytes", "KiB", "MiB", "GiB", "TiB", "PiB"))
}
_SIZE = rf"(?P<size>[\d.]+) (?P<unit>{'|'.join(_UNITS)})"
_CPU_ALLOCATOR = re.compile(
    r"DefaultCPUAllocator: (?:can't allocate|not enough) memory"
    r"(?:: you tried to allocate (?P<size>\d+) (?P<unit>bytes))?"
)
"""Message of the plain RuntimeError that torch's CPU allocator raises."""
_MAPPING = re.compile(
    r"unable to mmap (?P<size>\d+) (?P<unit>bytes) from file .*Cannot allocate memory"
)
"""Message of the plain RuntimeError that torch raises if it can't map a file or shared memory."""
_ASKED_FOR = (
    _CPU_ALLOCATOR,
    _MAPPING,
    re.compile(rf"Tried to allocate {_SIZE}"),  # torch, for a device
    re.compile(rf"Unable to allocate {_SIZE}"),  # NumPy
)
_FREE = re.compile(rf"of which {_SIZE} is free")
_DEVICE = re.compile(r"\b(?P<kind>GPU|CUDA|XPU|MPS)\b(?: device)? ?(?P<index>\d+)?")
_PASSED_ON = re.compile(r"\ACaught (?P<kind>\w+) in (?P<where>[^\n]+)\.\n")
"""First line of an exception's message, if torch caught the exception in a worker process or another thread
and raised it again."""
_WORKER = re.compile(r"DataLoader worker process \d+")
_ENDED_WORKER = re.compile(
    r"(?P<worker>DataLoader worker \(pid \d+\)) is killed by signal: (?P<signal>Killed|Bus error)\."
)
"""Message of the error that torch raises in the training process if the kernel killed a DataLoader worker.
``Killed`` is the signal of the kernel's out-of-memory killer. ``Bus error`` means that ``/dev/shm`` is full.
Through ``/dev/shm``, workers pass batches to the training process."""
_MEMORY_ERRORS = ("MemoryError", "OutOfMemoryError")


def is_out_of_memory(error: BaseException | None) -> bool:
    """Return True if ``error`` itself reports a failed allocation, on the host or on a device.

    An error that reports a killed DataLoader worker counts, too, because the kernel kills processes when
    memory runs out.
    """
    if isinstance(error, MemoryError) or is_of_a_device(error):
        return True
    if isinstance(error, OSError):
        return error.errno == errno.ENOMEM  # raised by ``mmap`` and ``os.fork``, for example
    if not isinstance(error, RuntimeError):
        return False
    message = str(error)
    passed_on = _PASSED_ON.search(message)
    if passed_on is not None and passed_on["kind"].endswith(_MEMORY_ERRORS):
        return True  # torch can't create some types again, such as NumPy's MemoryError
    return any(pattern.search(message) for pattern in (_CPU_ALLOCATOR, _MAPPING, _ENDED_WORKER))


def failed_allocation(error: BaseException | None) -> BaseException | None:
    """Return the exception of the failed allocation that caused ``error``; ``None`` if there is none.

    The search covers ``error`` itself, the ``__cause__`` and ``__context__`` of each exception, and the
    members of exception groups, at any depth. If the ``__cause__`` of the found exception is a failed
    allocation, too, the cause is returned instead, because its traceback shows the failed layer.
    """
    seen: set[int] = set()
    waiting = deque([error])
    while waiting:
        found = waiting.popleft()
        if found is None or id(found) in seen:
            continue
        seen.add(id(found))
        if is_out_of_memory(found):
            return _first_of_its_causes(found, seen)
        group = getattr(found, "exceptions", ())
        waiting += [found.__cause__, found.__context__]
        waiting += [each for each in group if isinstance(each, BaseException)]
    return None


def _first_of_its_causes(error: BaseException, seen: set[int]) -> BaseException:
    cause = error.__cause__
    while cause is not None and id(cause) not in seen and is_out_of_memory(cause):
        seen.add(id(cause))
        error, cause = cause, cause.__cause__
    return error


def describe(
    error: BaseException, step: int | None, raised: BaseException | None = None
) -> OutOfMemory:
    """Return the event that describes a failed allocation.

    For ``error``, `is_out_of_memory` is true. ``step`` is the last completed step; ``None``: no step has
    completed. ``raised`` is the exception that ended the program, if it is not ``error`` itself.
    """
    message = _informative_line(error)
    ended = _ENDED_WORKER.search(message)
    worker = _worker(error, ended)
    # A worker's allocation failed in another process, so the frames here say nothing about it.
    frames = [] if worker else [frame for frame, _ in walk_tb(error.__traceback__)]
    layer, phase = locate(frames)
    device = _device(message) if is_of_a_device(error) else "host"
    # The figures below are this process's. They do not hold for a worker, which had its own limit.
    here = device == "host" and not worker
    headroom = host_headroom() if here else UNKNOWN_HEADROOM
    heap = read_heap() if here else None
    return OutOfMemory(
        time_us=now_us(),
        step=step,
        device=device,
        requested=_requested(message),
        free=headroom.free if device == "host" else _size(_FREE.search(message)),
        limit=headroom.limit,
        limited_by=headroom.limited_by,
        allocated=headroom.used,
        reserved=None,
        layer=layer,
        phase=phase,
        message=_shown(message),
        free_after=headroom.free_after,
        worker=worker,
        raised_as=None if raised is None or raised is error else _shown(_named(raised)),
        signal=None if ended is None else ended["signal"],
        machine=machine_memory() if device == "host" else None,
        resident=highest_resident() if here else None,
        idle=None if heap is None else heap.idle,
        inputs=inputs_of_failure(frames),
    )


def _worker(error: BaseException, ended: re.Match[str] | None) -> str | None:
    if ended is not None:
        return ended["worker"]
    passed_on = _PASSED_ON.search(str(error))
    found = None if passed_on is None else _WORKER.search(passed_on["where"])
    return None if found is None else found[0]


def is_of_a_device(error: BaseException | None) -> bool:
    """Return True if an exception is the ``torch.OutOfMemoryError`` of a device's allocator."""
    return isinstance(error, getattr(sys.modules.get("torch"), "OutOfMemoryError", ()))


def _informative_line(error: BaseException) -> str:
    """Return the last line of an error's message that contains the requested size.

    If no line contains the size, return the message's first line; if the message is a traceback from a worker
    or another thread, its last line.
    """
    lines = [line.strip() for line in str(error).splitlines()]
    for line in reversed(lines):
        if any(pattern.search(line) for pattern in _ASKED_FOR):
            return line
    if _PASSED_ON.search(str(error)):
        lines = [line for line in reversed(lines) if line]
    return next(iter(lines), "") or type(error).__name__


def _named(error: BaseException) -> str:
    return f"{type(error).__name__}: {str(error).partition(chr(10))[0]}".removesuffix(": ")


def _shown(text: str) -> str:
    # Redact before cutting the text: a URL that was cut is not recognised, and its password would stay.
    return without_credentials(text[:_MAX_LOOKED_AT])[:_MAX_MESSAGE]


def _device(message: str) -> str:
    found = _DEVICE.search(message)
    if found is None:
        return "device"
    kind = {"GPU": "cuda"}.get(found["kind"], found["kind"].lower())
    return f"{kind}{found['index'] or 0}"


def _requested(message: str) -> int | None:
    found = (pattern.search(message) for pattern in _ASKED_FOR)
    return next((size for each in found if (size := _size(each)) is not None), None)


def _size(found: re.Match[str] | None) -> int | None:
    if found is None or found["size"] is None:
        return None
    return round(float(found["size"]) * _UNITS[str(found["unit"])])

"""Exceptions that report a failed allocation: recognition, description, and what catches them.

Accelerate's ``find_executable_batch_size`` and Lightning's batch size finder ask a function of theirs whether
an error is a failed allocation. While a session runs, memlog replaces this function by one that passes the
call on, and then notes the failure and the batch size that the search tried.

At exit, Python tells no exit handler that ``sys.exit(1)`` ends the program. A script that catches the error
of a failed allocation, prints a message and calls ``sys.exit(1)`` would count as finished. So after a failed
allocation, and not before, ``sys.exit`` is a function that passes each call on to the original.
"""

from __future__ import annotations

import errno
import functools
import re
import sys
import threading
from collections import deque
from collections.abc import Callable, Sequence
from traceback import walk_tb
from types import FrameType
from typing import Any, NoReturn

from msgspec.structs import replace

from memlog._internal.diagnostics import Diagnostics
from memlog._internal.redact import without_credentials
from memlog._internal.replacements import Replacements
from memlog.events import OutOfMemory, now_us
from memlog.inputs.step_inputs import inputs_of_failure
from memlog.oom.circumstances import (
    UNKNOWN_HEADROOM,
    highest_resident,
    host_headroom,
    line_of,
    locate,
    source_of,
)
from memlog.probes.machine import machine_memory
from memlog.probes.process import read_heap, read_pinned

_MAX_MESSAGE = 300
_MAX_DEVICE_MESSAGE = 1_500
"""Number of characters of torch's message about a device. The message lists the processes on the device."""
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
_DRIVER = re.compile(
    r"(?:CUDA|HIP) error: out of memory|\b(?:CUBLAS|CUDNN|CUSOLVER|CUFFT|CUSPARSE)_STATUS_ALLOC_FAILED"
    r"|\bCUFFT_ALLOC_FAILED|Cuda failure (?:\d+ )?'out of memory'"
)
"""Message of a RuntimeError if a device's driver or library has no memory: for the process's context, the
library's buffers, or page-locked memory of the host. torch's caching allocator is not involved."""
_NO_BATCH_SIZE = re.compile(r"\ANo executable batch size found, reached zero\.")
"""Message of the RuntimeError that ``accelerate.find_executable_batch_size`` raises at last."""
_IN_ANOTHER_PROCESS = re.compile(
    r"^-- (?P<worker>Process \d+) terminated with the following error:\n.*^(?P<error>[\w.]*"
    r"(?:MemoryError|OutOfMemoryError|RuntimeError|AcceleratorError)): (?P<message>[^\n]*)",
    re.MULTILINE | re.DOTALL,
)
"""Message of the exception that ``torch.multiprocessing.spawn`` raises if a process that it started fails."""
_REMOTE = ("_RemoteTraceback", "RemoteTraceback")
"""Causes of an exception that a pool of ``concurrent.futures`` or ``multiprocessing`` has passed on."""
_ASYNC = {
    "requested": re.compile(rf"^Requested +: {_SIZE}", re.MULTILINE),
    "free": re.compile(rf"^Free \(according to CUDA\): {_SIZE}", re.MULTILINE),
    "limit": re.compile(rf"^Device limit +: {_SIZE}", re.MULTILINE),
    "allocated": re.compile(rf"^Currently allocated +: {_SIZE}", re.MULTILINE),
}
"""Lines of the message of the allocator ``backend:cudaMallocAsync``."""
_ASKED_FOR = (
    _CPU_ALLOCATOR,
    _MAPPING,
    re.compile(rf"Tried to allocate {_SIZE}"),  # torch, for a device
    re.compile(rf"Unable to allocate {_SIZE}"),  # NumPy
)
_FREE = re.compile(rf"of which {_SIZE} is free")
_DEVICE = re.compile(r"\b(?P<kind>GPU|CUDA|XPU|MPS)(?: device)? (?P<index>\d+)\b")
_KIND = re.compile(r"\b(?P<kind>GPU|CUDA|XPU|MPS)\b")
_ASYNC_DEVICE = re.compile(r"\AAllocation on device (?P<index>\d+) would exceed allowed memory")
_PASSED_ON = re.compile(r"\ACaught (?P<kind>\w+) in (?P<where>[^\n]+)\.\n")
"""First line of an exception's message, if torch caught the exception in a worker process or another thread
and raised it again."""
_ROUNDED = 0.01
"""Maximum relative error of a size in torch's message."""
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
    message = str(error)[:_MAX_LOOKED_AT] if isinstance(error, Exception) else ""
    if (there := _in_another_process(message)) is not None:
        return there["error"].endswith(_MEMORY_ERRORS) or _says_so(there["message"])
    if not isinstance(error, RuntimeError):
        return False
    passed_on = _PASSED_ON.search(message)
    if passed_on is not None and passed_on["kind"].endswith(_MEMORY_ERRORS):
        return True  # torch can't create some types again, such as NumPy's MemoryError
    return _says_so(message)


def _says_so(message: str) -> bool:
    patterns = (_CPU_ALLOCATOR, _MAPPING, _ENDED_WORKER, _DRIVER, _NO_BATCH_SIZE)
    return any(pattern.search(message) for pattern in patterns)


def _in_another_process(message: str) -> re.Match[str] | None:
    return (
        _IN_ANOTHER_PROCESS.search(message) if "terminated with the following" in message else None
    )


def failed_allocation(error: BaseException | None) -> BaseException | None:
    """Return the exception of the failed allocation that caused ``error``; ``None`` if there is none.

    The search covers ``error`` itself, the ``__cause__`` and ``__context__`` of each exception, and the
    members of exception groups, at any depth. If the ``__cause__`` of the found exception is a failed
    allocation, too, the cause is returned instead, because its traceback shows the failed layer.
    """
    seen: set[int] = set()
    waiting = deque([error])
    while waiting:
        candidate = waiting.popleft()
        # Exceptions can refer to each other in a circle.
        if candidate is None or id(candidate) in seen:
            continue
        seen.add(id(candidate))
        if is_out_of_memory(candidate):
            return _first_of_its_causes(candidate, seen)
        group = getattr(candidate, "exceptions", ())
        waiting += [candidate.__cause__, candidate.__context__]
        waiting += [member for member in group if isinstance(member, BaseException)]
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
    text = str(error)[:_MAX_LOOKED_AT]
    message = _informative_line(error)
    ended = _ENDED_WORKER.search(message)
    worker = _worker(error, ended)
    # A worker's allocation failed in another process, so the frames here say nothing about it.
    frames = [] if worker else [frame for frame, _ in walk_tb(error.__traceback__)]
    layer, phase = locate(frames)
    of_driver = _DRIVER.search(text) is not None
    pinned = of_driver and not worker and _asks_for_pinned_memory(frames)
    device = "host" if pinned else _device(error, message, of_driver=of_driver)
    # The figures below are this process's. They do not hold for a worker, which had its own limit.
    here = device == "host" and not worker
    headroom = host_headroom() if here else UNKNOWN_HEADROOM
    heap = read_heap() if here else None
    free = headroom.free if device == "host" else _size(_FREE.search(message))
    held = read_pinned() if pinned else None
    sizes = {name: _size(pattern.search(text)) for name, pattern in _ASYNC.items()}
    return OutOfMemory(
        time_us=now_us(),
        step=step,
        device=device,
        requested=_requested(message) or sizes["requested"],
        free=sizes["free"] if free is None else free,
        limit=headroom.limit or sizes["limit"],
        limited_by=headroom.limited_by or (sizes["limit"] and "the device's memory") or None,
        allocated=headroom.used or sizes["allocated"],
        reserved=None,
        layer=layer,
        phase=phase,
        message=_shown(message, _MAX_DEVICE_MESSAGE if device != "host" else _MAX_MESSAGE),
        free_after=headroom.free_after,
        worker=worker,
        raised_as=None if raised is None or raised is error else shown_error(raised),
        signal=None if ended is None else ended["signal"],
        machine=machine_memory() if device == "host" else None,
        resident=highest_resident() if here else None,
        idle=None if heap is None else heap.idle,
        inputs=inputs_of_failure(frames),
        line=line_of(frames),
        activity="pinned memory" if pinned else None,
        size=None if held is None else held.held,
    )


def complete(described: OutOfMemory, seen: Sequence[OutOfMemory]) -> OutOfMemory:
    """Return the event of a failed allocation with all that is known of it.

    ``described`` is the event by the exception that ended the program. ``seen`` are the events of the
    failures that memlog saw as they happened, the oldest first. The exception is of one of these, of a later
    one, or of one in another process.
    """
    same = (event for event in reversed(seen) if _is_same(described, event))
    known = next(same, None)
    if known is None:
        return described
    return replace(
        known,
        message=described.message,
        raised_as=described.raised_as,
        inputs=known.inputs or described.inputs,
    )


def _is_same(described: OutOfMemory, seen: OutOfMemory) -> bool:
    if described.worker is not None:
        return False
    if _NO_BATCH_SIZE.search(described.message):
        return True
    if described.device != seen.device or described.requested is None:
        return False
    # torch's message has the size with two digits after the point.
    return abs(described.requested - (seen.requested or 0)) <= _ROUNDED * described.requested


def _asks_for_pinned_memory(frames: Sequence[FrameType]) -> bool:
    """Return True if the innermost function or line asks for page-locked memory of the host."""
    names = [frame.f_code.co_name for frame in frames[-1:]]
    return "pin_memory" in names or "pin_memory" in source_of(frames)


def _worker(error: BaseException, ended: re.Match[str] | None) -> str | None:
    if ended is not None:
        return ended["worker"]
    if type(error.__cause__).__name__ in _REMOTE:
        return "a process of a pool"
    there = _in_another_process(str(error)[:_MAX_LOOKED_AT])
    if there is not None:
        return f"{there['worker']} of torch.multiprocessing.spawn"
    passed_on = _PASSED_ON.search(str(error))
    worker = None if passed_on is None else _WORKER.search(passed_on["where"])
    return None if worker is None else worker[0]


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
        if any(pattern.search(line) for pattern in (*_ASKED_FOR, _DRIVER)):
            return line
    if (there := _in_another_process(str(error)[:_MAX_LOOKED_AT])) is not None:
        return there["message"]
    if _PASSED_ON.search(str(error)):
        lines = [line for line in reversed(lines) if line]
    return next(iter(lines), "") or type(error).__name__


def _named(error: BaseException) -> str:
    return f"{type(error).__name__}: {str(error).partition(chr(10))[0]}".removesuffix(": ")


def shown_error(error: BaseException) -> str:
    """Return an error's class and the first line of its message, redacted and cut."""
    return _shown(_named(error))


def _shown(text: str, most: int = _MAX_MESSAGE) -> str:
    # Redact before cutting the text: a URL that was cut is not recognised, and its password would stay.
    return without_credentials(text[:_MAX_LOOKED_AT])[:most]


def _device(error: BaseException, message: str, *, of_driver: bool) -> str:
    """Return the name of the device on which an allocation failed, or ``host``."""
    if of_driver:
        torch: Any = sys.modules.get("torch")
        known = torch is not None and torch.cuda.is_initialized()
        return f"cuda{torch.cuda.current_device()}" if known else "device"
    there = _in_another_process(str(error)[:_MAX_LOOKED_AT])
    is_of_device = there is not None and there["error"].endswith("OutOfMemoryError")
    if not (is_of_a_device(error) or is_of_device or _NO_BATCH_SIZE.search(message)):
        return "host"
    match = _ASYNC_DEVICE.search(message)
    if match is not None:
        return f"cuda{match['index']}"
    match = _DEVICE.search(message) or _KIND.search(message)
    if match is None:
        return "device"
    kind = {"GPU": "cuda"}.get(match["kind"], match["kind"].lower())
    return f"{kind}{match.groupdict().get('index') or 0}"


def _requested(message: str) -> int | None:
    matches = (pattern.search(message) for pattern in _ASKED_FOR)
    return next((size for match in matches if (size := _size(match)) is not None), None)


def _size(found: re.Match[str] | None) -> int | None:
    if found is None or found["size"] is None:
        return None
    return round(float(found["size"]) * _UNITS[str(found["unit"])])


_LIGHTNING = ("is_oom_error", "new_size")
_FINDERS = {
    "accelerate.utils.memory": ("should_reduce_batch_size", "batch_size"),
    "lightning.pytorch.tuner.batch_size_scaling": _LIGHTNING,
    "pytorch_lightning.tuner.batch_size_scaling": _LIGHTNING,
}
"""Modules, their functions, and the caller's variable that holds the batch size."""


class BatchSizeFinders:
    """Replacements of the libraries' functions from `begin` to `stop`.

    ``caught`` is called with each failed allocation and the batch size; ``None``: the size is unknown.
    """

    def __init__(
        self, caught: Callable[[BaseException, int | None], None], diagnostics: Diagnostics
    ) -> None:
        self._caught = caught
        self._diagnostics = diagnostics
        self._replaced = Replacements()

    def begin(self) -> None:
        """Replace the functions as soon as their modules are imported."""
        self._replaced.when_imported(_FINDERS, self._imported)

    def stop(self) -> None:
        """Restore the functions, unless another package has replaced them later."""
        self._replaced.undo()

    def _imported(self, module: Any) -> None:
        with self._diagnostics.contained("noticing searches for a batch size"):
            name, variable = _FINDERS[module.__name__]
            original = getattr(module, name)

            @functools.wraps(original)
            def asking(error: BaseException, *args: Any, **kwargs: Any) -> Any:
                answer = original(error, *args, **kwargs)
                # After `stop`, another package's replacement can still call this function.
                if answer and self._replaced:
                    with self._diagnostics.contained("noting a failed allocation"):
                        size = sys._getframe(1).f_locals.get(variable)  # noqa: SLF001 - inspect's is the same
                        self._caught(error, size if type(size) is int else None)
                return answer

            self._replaced.replace(module, name, asking)


_original: Callable[..., NoReturn] | None = None
_wrapper: Callable[..., NoReturn] | None = None
_exiting: SystemExit | None = None


def watch(called: Callable[[SystemExit], bool]) -> None:
    """Call a function with each exit with an error that the main thread asks for, until `stop`.

    If the function returns True, `exiting` returns this exit. The function must not raise.
    """
    global _original, _wrapper
    if _wrapper is not None:
        return
    original = sys.exit

    @functools.wraps(original)
    def passing_on(*arguments: Any, **named: Any) -> NoReturn:
        global _exiting  # noqa: PLW0603 - the process ends once
        # In another thread, `sys.exit` ends only that thread.
        if _original is not None and threading.current_thread() is threading.main_thread():
            code = next(iter((*arguments, *named.values())), None)
            asked = SystemExit(code)
            _exiting = asked if code and called(asked) else None
        original(*arguments, **named)

    _original, _wrapper = original, passing_on
    sys.exit = passing_on


def stop() -> None:
    """Set ``sys.exit`` to the original, unless another package has replaced it meanwhile."""
    global _original, _wrapper  # noqa: PLW0603 - see `watch`
    if _original is not None and sys.exit is _wrapper:
        sys.exit = _original
    _original = _wrapper = None


def exiting() -> SystemExit | None:
    """Return the exit that the program asked for after a failed allocation; ``None``: none."""
    return _exiting

"""Interface of all engines, and the engine for any device that reads the allocator's statistics.

The engine misses a peak between two readings. On the CPU there is nothing to read, because the resident set
does not change from layer to layer. On the CPU, the engine only counts calls and measures times.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Protocol, TypeAlias

import msgspec
import torch

from memlog._internal.diagnostics import Diagnostics
from memlog.torchside.loaded import statistics_of
from memlog.trace.encoding import BACKWARD, READING, pack
from memlog.trace.records import Exactness, Fragmentation
from memlog.tracer.engines.storage_events import EventLog
from memlog.tracer.module_hooks import BackwardMarks, Hooks
from memlog.tracer.module_names import ModuleNames
from memlog.tracer.module_stack import ModuleStack, ThreadState

AllocatorBytes: TypeAlias = tuple[int, int | None]
"""Allocated bytes and reserved bytes; ``None`` if the reserved bytes are unknown."""

NOTHING_RESERVED = "the CPU has no caching allocator, so nothing is reserved"


def reader(device: torch.device) -> Callable[[], AllocatorBytes] | None:
    """Return a function that reads a device's statistics; ``None`` for the CPU.

    On the CPU only the resident set of the process is known. Its size does not change from layer to layer.
    """
    if device.type in ("cuda", "xpu"):
        return _caching_reader(device)
    if device.type == "mps":
        return _mps_reading
    return None


def fragmentation(
    device: torch.device, snapshot: Any = None
) -> tuple[Fragmentation | None, str | None]:
    """Return a device's current fragmentation, and the reason if the fragmentation is unknown.

    ``snapshot``: Snapshot of the allocator. If it has blocks of the device, the fragmentation is computed
    from them, otherwise from the allocator's statistics.
    """
    read = reader(device)
    if read is None:
        return None, NOTHING_RESERVED
    from memlog.trace.cuda_join import of_segments, of_statistics  # noqa: PLC0415 - the CPU needs none

    if snapshot is not None:
        result = of_segments(snapshot.get("segments", ()), device.index or 0)
        if result is not None:
            return result, None
    allocated, reserved = read()
    result = of_statistics(allocated, reserved)
    return result, None if result else f"{device.type} does not report reserved bytes"


def _caching_reader(device: torch.device) -> Callable[[], AllocatorBytes]:
    index = device.index or 0
    # torch's public functions flatten all statistics at each call.
    raw = statistics_of(torch, device.type)
    if raw is not None:

        def quick() -> AllocatorBytes:
            values = raw(index)
            allocated = int(values["allocated_bytes"]["all"]["current"])
            return allocated, int(values["reserved_bytes"]["all"]["current"])

        return quick
    module: Any = getattr(torch, device.type)

    def public() -> AllocatorBytes:
        return int(module.memory_allocated(index)), int(module.memory_reserved(index))

    return public


def _mps_reading() -> AllocatorBytes:
    return int(torch.mps.current_allocated_memory()), int(torch.mps.driver_allocated_memory())


class EngineReport(msgspec.Struct, frozen=True):
    """Report of an engine about its window. The engine's events are not part of the report."""

    unseen: tuple[str, ...] = ()
    """Limitations of the trace, as whole sentences."""
    fragmentation: Fragmentation | None = None
    fragmentation_reason: str | None = None
    dropped: dict[str, int] = {}
    """Events that could not be recorded, counted by reason."""
    lines: tuple[str, ...] = ()
    """Texts of the program's lines to which events refer. Events number the lines from 1."""
    exactness: Exactness | None = None
    """Exactness of the peaks; ``None``: as in the engine's `Choice`."""


class Engine(Protocol):
    """Recorder of one window, which writes to an `EventLog`."""

    def start(self, optimizers: Sequence[Any] = ()) -> None:
        """Start recording on this thread.

        ``optimizers``: Optimizers whose state exists already.
        """

    def module_begins(self, module: Any, args: Any) -> None:
        """Record the begin of a module's ``forward``.

        The caller is a hook, or code that opens a window inside this ``forward``.
        """

    def stop(self) -> EngineReport:
        """Stop recording, and write the remaining events."""

    def stop_recording(self) -> None:
        """Stop recording, and leave the hooks in torch until `stop`. Hooks and all threads may call this."""

    def leave(self) -> bool:
        """Remove from torch what `stop` could not remove.

        Return True if nothing of the engine is left in torch.
        """


class HookEngine:
    """Base class of engines that trace every thread that calls the model's modules."""

    def __init__(self, log: EventLog, names: ModuleNames, diagnostics: Diagnostics) -> None:
        self._log = log
        self._names = names
        self._hooks = Hooks(self, diagnostics, log.took)
        self._module_stack = ModuleStack(names, self._emit, all_threads=True)
        self._backward = BackwardMarks(self._backward_reaches, diagnostics, log.took)
        self._stopped = False

    def leave(self) -> bool:
        """Return True if `stop` was called. Nothing of a stopped engine is left in torch."""
        return self._stopped

    def stop_recording(self) -> None:
        self._module_stack.closed = True

    def module_begins(self, module: Any, args: Any) -> None:
        thread_state = self._module_stack.thread_state()
        # When a backward pass reaches the inputs, it leaves this module for the surrounding one.
        surrounding = thread_state.stack[-1][0] if thread_state is not None else 0
        if self._module_stack.module_begins(module) is not None:
            self._backward.mark(args, surrounding)

    def module_ends(self, module: Any, output: Any) -> None:
        layer = self._module_stack.module_ends(module)
        if layer is not None:
            self._backward.mark(output, layer)

    def optimizer_begins(self, optimizer: Any) -> None:
        self._module_stack.optimizer_begins(optimizer)

    def optimizer_ends(self, optimizer: Any) -> None:
        self._module_stack.optimizer_ends(optimizer)

    def _end(self) -> None:
        self._hooks.remove()
        self._module_stack.close()
        self._backward.close()

    def _backward_reaches(self, layer: int) -> None:
        thread_state = self._module_stack.thread_state(join=True)
        if thread_state is not None:
            self._module_stack.set_phase(thread_state, layer, BACKWARD)

    def _emit(self, kind: int, layer: int, phase: int, thread_state: ThreadState) -> None:
        raise NotImplementedError


class SamplerEngine(HookEngine):
    def __init__(
        self, log: EventLog, names: ModuleNames, diagnostics: Diagnostics, device: torch.device
    ) -> None:
        super().__init__(log, names, diagnostics)
        self._device = device
        self._read = reader(device)

    def start(self, optimizers: Sequence[Any] = ()) -> None:
        """Start recording. ``optimizers`` are ignored, because they make no difference to statistics."""
        del optimizers
        self._module_stack.begin()
        self._sample(0, 1, 0)
        self._hooks.install()

    def stop(self) -> EngineReport:
        """Stop recording. A second call is harmless."""
        if not self._stopped:
            self._stopped = True
            self._end()
            self._sample(0, 1, 0)
        result, reason = fragmentation(self._device)
        return EngineReport(self._unseen(), result, reason)

    def _emit(self, kind: int, layer: int, phase: int, thread_state: ThreadState) -> None:
        self._sample(layer, phase, thread_state.number)
        self._log.append(pack(0, 0, self._log.now(), layer, kind, phase, 0, thread_state.number))
        self._log.fold_when_full()

    def _sample(self, layer: int, phase: int, thread: int) -> None:
        if self._read is not None:
            allocated, reserved = self._read()
            now = self._log.now()
            self._log.append(pack(allocated, reserved or 0, now, layer, READING, phase, 0, thread))

    def _unseen(self) -> tuple[str, ...]:
        if self._read is None:
            return (
                "On the CPU this engine sees no bytes: the resident set does not change with layers.",
            )
        return (
            "The allocator is read only when modules begin and end. Peaks in between are not seen, so each "
            "peak is a lower bound.",
            "The category of memory, and what a layer allocated itself, are not seen.",
        )

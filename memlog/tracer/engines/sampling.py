"""Engine for any device. It reads the allocator's statistics whenever a module begins or ends.

The engine misses a peak between two readings. On the CPU there is nothing to read, because the resident set
does not change from layer to layer. On the CPU, the engine only counts calls and measures times.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from memlog._internal.diagnostics import Diagnostics
from memlog.trace.encoding import READING, pack
from memlog.tracer.attribution.module_names import ModuleNames
from memlog.tracer.attribution.module_stack import ThreadState
from memlog.tracer.engines import allocator_stats
from memlog.tracer.engines.base import EngineReport
from memlog.tracer.engines.hook_engine import HookEngine
from memlog.tracer.event_log import EventLog


class SamplerEngine(HookEngine):
    def __init__(
        self, log: EventLog, names: ModuleNames, diagnostics: Diagnostics, device: torch.device
    ) -> None:
        super().__init__(log, names, diagnostics)
        self._device = device
        self._read = allocator_stats.reader(device)

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
        found, reason = allocator_stats.fragmentation(self._device)
        return EngineReport(self._unseen(), found, reason)

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

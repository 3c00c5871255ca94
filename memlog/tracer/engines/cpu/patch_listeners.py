"""Listeners of the patched torch functions. They record changes of storages that no dispatch mode sees."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

from memlog._internal.diagnostics import Diagnostics
from memlog.tracer.attribution.module_stack import ModuleStack, ThreadState
from memlog.tracer.engines.cpu import patches
from memlog.tracer.engines.cpu.live_storages import LiveStorages
from memlog.tracer.engines.cpu.storage_events import AllocationOwner
from memlog.tracer.hooks.function_patch import FunctionPatch


@dataclass(eq=False)
class PatchListeners:
    """Listeners of the patched torch functions while a window is open."""

    _live_storages: LiveStorages
    _module_stack: ModuleStack
    _owner: Callable[[ThreadState], AllocationOwner]
    _diagnostics: Diagnostics

    def subscribe(self) -> None:
        for patch, listener in self._listeners():
            patch.add(listener)

    def unsubscribe(self) -> None:
        for patch, listener in self._listeners():
            patch.remove(listener)

    def _listeners(self) -> Iterator[tuple[FunctionPatch, Callable[[Any, Any], None]]]:
        yield patches.STORAGE_RESIZES, self._storage_resized
        yield patches.RANDOM_STATE_COPIES, self._random_state_copied

    def _random_state_copied(self, state: Any, _args: Any) -> None:
        with self._diagnostics.contained("noticing a copy of a generator's state"):
            thread_state = self._module_stack.thread_state()
            if thread_state is not None:
                self._live_storages.track(state, self._owner(thread_state))

    def _storage_resized(self, _result: Any, args: Any) -> None:
        storage = args[0]
        with self._diagnostics.contained("noticing that a storage was resized"):
            thread_state = self._module_stack.thread_state()
            # The storages of an estimate's fake tensors are on the device "meta".
            if thread_state is not None and storage.device.type in ("cpu", "meta"):
                self._live_storages.track_resized(storage, self._owner(thread_state))

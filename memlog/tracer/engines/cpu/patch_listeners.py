"""Listeners of the patched torch functions. They record changes of storages that no dispatch mode sees."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

from memlog._internal.diagnostics import Diagnostics
from memlog.tracer.attribution.module_stack import ModuleStack, ThreadState
from memlog.tracer.engines.cpu import patches
from memlog.tracer.engines.cpu.live_storages import LiveStorages
from memlog.tracer.engines.cpu.storage_events import AllocationOwner
from memlog.tracer.hooks.function_patch import FunctionPatch


@dataclass(eq=False)
class PatchListeners:
    """Listeners of the patched torch functions while a window is open.

    Attributes:
        compiled_calls: Number of calls of compiled code.
    """

    _live_storages: LiveStorages
    _module_stack: ModuleStack
    _owner: Callable[[ThreadState], AllocationOwner]
    _diagnostics: Diagnostics
    _compiled: Sequence[FunctionPatch] = field(default=(), init=False)
    compiled_calls: int = field(default=0, init=False)

    def subscribe(self) -> None:
        self._compiled = patches.compiled_code()
        for patch, listener in self._listeners():
            patch.add(listener)

    def unsubscribe(self) -> None:
        for patch, listener in self._listeners():
            patch.remove(listener)

    @property
    def compiled_code_ran(self) -> bool:
        """True if compiled code ran, or may have run.

        Compiled code that the process loads during the window has no listener, so this code may have run.
        """
        return self.compiled_calls > 0 or len(patches.compiled_code()) > len(self._compiled)

    def _listeners(self) -> Iterator[tuple[FunctionPatch, Callable[[Any, Any], None]]]:
        yield patches.STORAGE_RESIZES, self._storage_resized
        yield patches.RANDOM_STATE_COPIES, self._random_state_copied
        for patch in self._compiled:
            yield patch, self._compiled_code_called

    def _compiled_code_called(self, _result: Any, _args: Any) -> None:
        with self._diagnostics.contained("noticing that compiled code ran"):
            if self._module_stack.thread_state() is not None:
                self.compiled_calls += 1

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

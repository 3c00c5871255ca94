"""Memory of graphs that Inductor has compiled, from the allocator's events while they run."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

from memlog._internal.diagnostics import Diagnostics
from memlog.tracer import torch_private
from memlog.tracer.attribution.module_stack import ModuleStack, ThreadState
from memlog.tracer.engines.cpu import op_workspace, patches
from memlog.tracer.engines.cpu.dispatch_mode import ObservingMode
from memlog.tracer.engines.cpu.live_storages import LiveStorages
from memlog.tracer.engines.cpu.storage_events import AllocationOwner
from memlog.tracer.hooks.function_patch import AroundPatch
from memlog.tracer.tensor_storages import tensors_in


@dataclass(eq=False)
class CompiledCode:
    """Recording of compiled graphs while a window is open.

    Attributes:
        calls: Number of calls of compiled graphs, by the layer that they belong to.
        unknown: Number of calls with allocations that are not known.
    """

    _live_storages: LiveStorages
    _module_stack: ModuleStack
    _mode: ObservingMode
    _owner: Callable[[ThreadState], AllocationOwner]
    _diagnostics: Diagnostics
    _patches: Sequence[AroundPatch] = field(default=(), init=False)
    calls: Counter[int] = field(default_factory=Counter, init=False)
    unknown: int = field(default=0, init=False)
    _compilations: int = field(default=0, init=False)
    _running: bool = field(default=False, init=False)
    _seen: bool = field(default=False, init=False)

    def begin(self) -> None:
        # On fake tensors, no compiled code runs unseen: an estimate makes each buffer by an operation.
        self._seen = torch_private.fakes_active()
        if self._seen:
            return
        self._patches = patches.compiled_code()
        self._compilations = torch_private.compilations()
        for patch in self._patches:
            patch.add(self._call)

    def end(self) -> None:
        for patch in self._patches:
            patch.remove(self._call)

    @property
    def may_have_run(self) -> bool:
        """True if compiled code may have run unseen, because code was compiled or loaded in the window."""
        if self._seen:
            return False
        return torch_private.compilations() != self._compilations or len(
            patches.compiled_code()
        ) > len(self._patches)

    def _call(self, function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        thread_state = self._module_stack.thread_state(join=True)
        # Compiled code that compiled code calls is a part of it.
        if thread_state is None or self._running:
            return function(*args, **kwargs)
        with self._diagnostics.contained("looking at the inputs of compiled code"):
            self._track_inputs(args)
        out, sizes, returned = None, None, False
        self._running = True
        try:
            with (
                self._mode.paused(),
                self._live_storages.events.held(torch_private.mark_profile) as frees,
                torch_private.without_log_warnings(),
            ):
                out, sizes = op_workspace.allocations(function, args, kwargs)
            returned = True
        finally:
            self._running = False
            with self._diagnostics.contained("recording compiled code"):
                owner = self._owner(thread_state)
                self.calls[owner.layer] += 1
                known = self._live_storages.add_compiled(sizes, tensors_in(out), frees, owner)
                self.unknown += not (known and returned)
        return out

    def _track_inputs(self, args: Any) -> None:
        # No frame that is left while the code runs may hold an input: the code frees most of them.
        for tensor in tensors_in(args):
            self._live_storages.track_existing(tensor)

"""Patches of torch functions that no dispatch mode sees, and what they record.

FSDP frees gathered parameters with ``storage.resize_(0)``. Checkpointing copies the random number generator's
state. Compiled code calls the allocator directly. memlog replaces each of these functions while a window is
open, and then restores the original.

torch computes some derivatives in another way while any dispatch mode is active (``isTensorSubclassLike`` in
its sources). In torch 2.13's own tests, this changes the results of the derivatives in `_NODES`, and of no
other derivatives. A hook on each of these nodes removes the mode before the node runs. Autograd restores the
mode for the next node. So the tracer sees the results of the node, but not the allocations inside the node.
"""

from __future__ import annotations

import sys
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any, Final

import torch
from torch import Tensor

from memlog._internal.diagnostics import Diagnostics
from memlog.tracer import torch_private
from memlog.tracer.attribution.module_stack import ModuleStack, ThreadState
from memlog.tracer.engines.cpu.dispatch_mode import ObservingMode, was_seen
from memlog.tracer.engines.cpu.live_storages import LiveStorages
from memlog.tracer.engines.cpu.storage_events import AllocationOwner
from memlog.tracer.hooks.function_patch import AroundPatch, FunctionPatch
from memlog.tracer.tensor_storages import plain_tensors

STORAGE_RESIZES: Final = FunctionPatch(torch.UntypedStorage, "resize_")
"""Resizing of storages by Python code."""
RANDOM_STATE_COPIES: Final = FunctionPatch(torch, "get_rng_state")
"""Copies of the random number generator's state. Checkpointing makes and keeps such copies."""

_COMPILED = (
    ("torch._inductor.output_code", "CompiledFxGraph"),
    ("torch._inductor.output_code", "CompiledAOTI"),
    ("torch.export.pt2_archive._package", "AOTICompiledModel"),
)
"""Classes whose call runs Inductor's code, in the forward or the backward pass."""
_compiled: dict[str, AroundPatch] = {}


def compiled_code() -> Sequence[AroundPatch]:
    """Return a patch for each class that runs Inductor's code and that this process has loaded."""
    for module, name in _COMPILED:
        found = getattr(sys.modules.get(module), name, None)
        if found is not None and name not in _compiled:
            _compiled[name] = AroundPatch(found, "__call__")
    return tuple(_compiled.values())


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
        yield STORAGE_RESIZES, self._storage_resized
        yield RANDOM_STATE_COPIES, self._random_state_copied

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


_aten: Final = torch.ops.aten
_OPERATIONS: Final = (
    _aten.masked_fill.Tensor,
    _aten.masked_fill_.Tensor,
    _aten.prod.default,
    _aten.prod.dim_int,
)
_NODES: Final = frozenset(("MaskedFillBackward1", "ProdBackward0", "ProdBackward1"))
_MAX_NODES: Final = 1_000_000
"""Maximum number of nodes to look at in one graph. Further nodes run with the mode."""


class UntracedDerivatives:
    """Listener for backward passes while a window is open.

    ``record``: Function to call with each result of a derivative that ran without the dispatch mode.

    Attributes:
        returned: Bytes of the results of each derivative that ran without the mode.
    """

    def __init__(
        self, mode: ObservingMode, record: Callable[[Tensor], None], diagnostics: Diagnostics
    ) -> None:
        self._mode = mode
        self._record = record
        self._diagnostics = diagnostics
        self.returned: Counter[str] = Counter()

    @contextmanager
    def during_backward(self, outputs: Sequence[Any], *, makes_cycles: bool) -> Iterator[None]:
        """During one backward pass, hook the nodes that have to run without the mode."""
        del makes_cycles
        handles: list[Any] = []
        # A mode that has stopped observing does not see which operations run.
        if not self._mode.measures or any(map(was_seen, _OPERATIONS)):
            with self._diagnostics.contained("looking through a graph"):
                for node in _nodes_concerned(outputs):
                    handles.append(node.register_prehook(self._begins))
                    handles.append(node.register_hook(partial(self._ends, node.name())))
        try:
            yield
        finally:
            for handle in handles:
                handle.remove()

    def _begins(self, _gradients: Any) -> None:
        torch_private.remove_mode_for_node(self._mode)

    def _ends(self, name: str, results: Any, _gradients: Any) -> None:
        with self._diagnostics.contained("recording a derivative"):
            for tensor in results:
                if isinstance(tensor, Tensor):
                    self.returned[name] += sum(plain.nbytes for plain in plain_tensors(tensor))
                    self._record(tensor)


def _nodes_concerned(outputs: Sequence[Any]) -> list[Any]:
    """Return the nodes of a graph that have to run without the mode."""
    with torch._C.DisableTorchFunction():
        waiting = [one.grad_fn if isinstance(one, Tensor) else one.node for one in outputs]
    seen: dict[int, Any] = {}
    while waiting and len(seen) < _MAX_NODES:
        node = waiting.pop()
        if node is not None and id(node) not in seen:
            seen[id(node)] = node
            waiting += [following for following, _ in node.next_functions]
    return [node for node in seen.values() if node.name() in _NODES]

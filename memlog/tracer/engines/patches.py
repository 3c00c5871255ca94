"""Memory that no dispatch mode sees, by patches of torch, and copies made only while a mode is active.

FSDP frees gathered parameters with ``storage.resize_(0)``. Checkpointing copies the random number generator's
state. Compiled code calls the allocator directly. memlog replaces each of these functions while a window is
open, and then restores the original.

torch computes some derivatives in another way while any dispatch mode is active (``isTensorSubclassLike`` in
its sources). In torch 2.13's own tests, this changes the results of the derivatives in `_NODES`, and of no
other derivatives. A hook on each of these nodes removes the mode before the node runs. Autograd restores the
mode for the next node. So the tracer sees the results of the node, but not the allocations inside the node.

In an untraced step, torch writes some results into an existing tensor that nothing else owns. While a mode is
active, torch treats every tensor as a subclass (``isTensorSubclassLike`` in torch's sources). torch then
makes a new tensor for the result, and frees the old tensor at once. The tracer counts both tensors as one.

torch makes a new tensor for these results:

* the sum of several gradients of one tensor, such as the weights of a packed GRU
* a result that a derivative (autograd's function for one operation) writes into a tensor that it made
* the sum of a matrix product and a bias or a mask, in ``linear`` or attention
"""

from __future__ import annotations

import functools
import sys
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any, Final

import torch
from torch import Tensor
from torch.nn.functional import linear

from memlog._internal.diagnostics import Diagnostics
from memlog.torchside import internals
from memlog.torchside.internals import TorchDispatchMode
from memlog.torchside.tensors import DisableTorchFunction
from memlog.trace.encoding import BACKWARD
from memlog.tracer.engines.dispatch_mode import ObservingMode, was_seen
from memlog.tracer.engines.live_storages import LiveStorages
from memlog.tracer.engines.storage_events import AllocationOwner, TrackedStorage
from memlog.tracer.function_patch import AroundPatch, FunctionPatch
from memlog.tracer.module_stack import ModuleStack, ThreadState
from memlog.tracer.tensor_storages import plain_tensors

STORAGE_RESIZES: Final = FunctionPatch(torch.UntypedStorage, "resize_")
"""Resizing of storages by Python code."""
RANDOM_STATE_COPIES: Final = FunctionPatch(torch, "get_rng_state")
"""Copies of the random number generator's state. Checkpointing makes and keeps such copies."""

_compiled: dict[str, AroundPatch] = {}


def compiled_code() -> Sequence[AroundPatch]:
    """Return a patch for each class that runs Inductor's code and that this process has loaded."""
    for module, name in internals.COMPILED_CODE:
        runner = getattr(sys.modules.get(module), name, None)
        if runner is not None and name not in _compiled:
            _compiled[name] = AroundPatch(runner, "__call__")
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
        internals.remove_mode_for_node(self._mode)

    def _ends(self, name: str, results: Any, _gradients: Any) -> None:
        with self._diagnostics.contained("recording a derivative"):
            for tensor in results:
                if isinstance(tensor, Tensor):
                    self.returned[name] += sum(plain.nbytes for plain in plain_tensors(tensor))
                    self._record(tensor)


def _nodes_concerned(outputs: Sequence[Any]) -> list[Any]:
    """Return the nodes of a graph that have to run without the mode."""
    # A tensor subclass could run code of its own to return `grad_fn`.
    with DisableTorchFunction():
        waiting = [
            output.grad_fn if isinstance(output, Tensor) else output.node for output in outputs
        ]
    # The nodes are kept. Otherwise another node could get the same `id`.
    seen: dict[int, Any] = {}
    while waiting and len(seen) < _MAX_NODES:
        node = waiting.pop()
        if node is not None and id(node) not in seen:
            seen[id(node)] = node
            waiting += [following for following, _ in node.next_functions]
    return [node for node in seen.values() if node.name() in _NODES]


_OTHER: Final = 0
_ADDS: Final = 1
_FILLS_WITH_ZEROS: Final = 2
_MULTIPLIES: Final = 3
_HAS_IN_PLACE: Final = 4
"""Role of an operation that also exists as an in-place operation."""

_ADD: Final = torch.ops.aten.add.Tensor
_CLONE: Final = torch.ops.aten.clone.default

_ACCUMULATES: Final = "torch::autograd::AccumulateGrad"
_LOGITS: Final = "BinaryCrossEntropyWithLogitsBackward0"
_WRITES: Final = {
    "Atan2Backward0": ("masked_fill",),
    "BinaryCrossEntropyBackward0": ("mul",),
    _LOGITS: ("mul", "sub"),
}
"""Names of operations, by the derivative that runs them. In an untraced step, the derivative runs these
operations in place, on tensors that it made."""
_ALTERED: Final = frozenset(
    (
        "ClampBackward0",
        "CumprodBackward0",
        "LinalgEigBackward0",
        "LinalgHouseholderProductBackward0",
        "MaxBackward1",
        "MedianBackward0",
        "MinBackward1",
        "NanmedianBackward0",
        "OrmqrBackward0",
    )
)
"""Derivatives that torch computes with different operations while a dispatch mode is active. The results are
the same. In torch 2.13's own tests, a mode changes further derivatives. `ModeCopies` or
`untraced_derivatives` handles these."""


class ModeCopies:
    """Search for the existing storage into which an untraced step would write an operation's result.

    Attributes:
        altered: Bytes allocated by each derivative that torch computes in another way during tracing.
    """

    def __init__(self, live_storages: LiveStorages) -> None:
        self._live_storages = live_storages
        self._unshared_count = unshared_reference_count()
        self._node: int | None = None
        self._name = ""
        self._began = 0
        self._zeros: set[int] = set()
        self._product = 0
        self.altered: Counter[str] = Counter()

    def replaced(
        self, func: Any, args: Any, out: Any, phase: int, thread_state: ThreadState
    ) -> TrackedStorage | None:
        """Return the storage into which an untraced step would write ``out``; ``None`` if there is none.

        ``out`` is the result of the operation ``func``, and its storage is not tracked yet. The returned
        storage is a guess. If the next event frees the returned storage, the guess is right.
        """
        role = _role_of(func)
        if phase == BACKWARD:
            return self._replaced_in_backward(func, role, args, out, thread_state)
        if role == _MULTIPLIES:
            # The product gets the next serial number.
            self._product = self._live_storages.serial + 1
        elif (
            role == _ADDS
            and sys.getrefcount(args[0]) == self._unshared_count
            and _same_shape_and_type(args[0], out)
        ):
            tracked = self._live_storages.tracked(args[0])
            return tracked if tracked is not None and tracked.serial == self._product else None
        return None

    def _replaced_in_backward(
        self, func: Any, role: int, args: Any, out: Any, thread_state: ThreadState
    ) -> TrackedStorage | None:
        if thread_state.node != self._node:
            self._node_begins(thread_state.node)
        if isinstance(out, Tensor) and self._is_altered(func, args):
            self.altered[self._name] += sum(plain.nbytes for plain in plain_tensors(out))
        if role == _FILLS_WITH_ZEROS:
            self._zeros.add(self._live_storages.serial + 1)
        elif (
            role in (_ADDS, _HAS_IN_PLACE)
            and not torch.is_grad_enabled()
            and _same_shape_and_type(args[0], out)
            and self._is_unshared(func, args[0])
            and _called_by_autograd()
        ):
            return self._live_storages.tracked(args[0])
        return None

    def _node_begins(self, number: int | None) -> None:
        node = internals.current_node()
        self._name = node.name() if node is not None else ""
        self._node, self._began = number, self._live_storages.serial
        self._zeros.clear()

    def _is_altered(self, func: Any, args: Any) -> bool:
        if self._name in _ALTERED:
            return True
        if self._name == _LOGITS:  # with class weights, it first adds the number 1
            return internals.operation_name(func) == "add" and not (
                isinstance(args[1], Tensor) and args[1].ndim
            )
        # Without a mode, autograd would not clone this sparse gradient, but share its memory with `.grad`.
        return (
            func is _CLONE
            and self._name == _ACCUMULATES
            and args[0].is_sparse
            and all(plain.is_contiguous() for plain in plain_tensors(args[0]))
        )

    def _is_unshared(self, func: Any, old: Tensor) -> bool:
        """Return True if only autograd or the running derivative owns the tensor ``old``."""
        tracked = self._live_storages.tracked(old)
        if tracked is None:
            return False
        made_here = tracked.serial > self._began
        if tracked.serial in self._zeros:
            return True
        if made_here and internals.operation_name(func) in _WRITES.get(self._name, ()):
            return True
        # A view holds the tensor that it is a view of.
        dense = old.is_contiguous() or old.nbytes == old.untyped_storage().nbytes()
        return func is _ADD and dense and not old._is_view() and _adds_up(made_here=made_here)


def _adds_up(*, made_here: bool) -> bool:
    """Return True if an addition in a backward pass may add up several gradients of one tensor.

    If ``made_here`` is true, the addition's first argument was made since autograd's current node began.
    Return True only if two results of this node are gradients of the same tensor. If ``made_here`` is
    false, always return True: the argument is older than the node, so only autograd can free it.
    """
    if not made_here:
        return True
    node = internals.current_node()
    edges = getattr(node, "next_functions", ())
    return len(set(edges)) < len(edges)


def _same_shape_and_type(old: Any, new: Any) -> bool:
    return (
        isinstance(old, Tensor)
        and isinstance(new, Tensor)
        and old.layout is new.layout is torch.strided
        and old.shape == new.shape
        and old.dtype == new.dtype
    )


def _called_by_autograd() -> bool:
    """Return True if autograd called the operation; False if Python code, such as a hook, called it."""
    frame: Any = sys._getframe(1)
    while frame is not None and frame.f_globals.get("__name__", "").startswith("memlog.tracer."):
        frame = frame.f_back
    return frame is None or frame.f_code.co_name == internals.ENGINE


@functools.cache
def _role_of(func: Any) -> int:
    name = internals.operation_name(func)
    if func is _ADD:
        return _ADDS
    if name in ("zeros", "zeros_like", "new_zeros"):
        return _FILLS_WITH_ZEROS
    if name in ("mm", "bmm"):
        return _MULTIPLIES
    return _HAS_IN_PLACE if name and hasattr(torch.ops.aten, f"{name}_") else _OTHER


@functools.cache
def unshared_reference_count() -> int:
    """Return the reference count of an operation's first argument that no Python code holds.

    The count is measured, because the count depends on the versions of torch and Python. Return -1 if an
    argument that Python code holds has no larger count.
    """
    counter = _ReferenceCounter()
    bias = torch.zeros(1)
    with torch.no_grad(), counter:
        # In `linear`, no Python code holds the product to which the bias is added. In the second line, Python
        # holds the zeros.
        linear(torch.zeros(2, 2, 2).transpose(0, 1), torch.zeros(1, 2), bias)
        torch.zeros(1).add(bias)
    unheld, *held = counter.counts or (-1,)
    return unheld if held and unheld < held[0] else -1


class _ReferenceCounter(TorchDispatchMode):
    """Mode that records the reference count of each addition's first argument."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call] # torch leaves it without types
        self.counts: list[int] = []

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        return False  # as in ObservingMode

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is _ADD:
            self.counts.append(sys.getrefcount(args[0]))
        return func(*args, **(kwargs or {}))

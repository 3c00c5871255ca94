"""Copies that torch makes only while a dispatch mode is active.

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
from typing import Any, Final

import torch
from torch import Tensor
from torch.nn.functional import linear
from torch.utils._python_dispatch import TorchDispatchMode

from memlog.trace.encoding import BACKWARD
from memlog.tracer import torch_private
from memlog.tracer.attribution.module_stack import ThreadState
from memlog.tracer.engines.cpu.live_storages import LiveStorages
from memlog.tracer.engines.cpu.storage_events import TrackedStorage
from memlog.tracer.tensor_storages import plain_tensors

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
        node = torch_private.current_node()
        self._name = node.name() if node is not None else ""
        self._node, self._began = number, self._live_storages.serial
        self._zeros.clear()

    def _is_altered(self, func: Any, args: Any) -> bool:
        if self._name in _ALTERED:
            return True
        if self._name == _LOGITS:  # with class weights, it first adds the number 1
            return torch_private.operation_name(func) == "add" and not (
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
        if made_here and torch_private.operation_name(func) in _WRITES.get(self._name, ()):
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
    node = torch_private.current_node()
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
    return frame is None or frame.f_code.co_name == torch_private.ENGINE


@functools.cache
def _role_of(func: Any) -> int:
    name = torch_private.operation_name(func)
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

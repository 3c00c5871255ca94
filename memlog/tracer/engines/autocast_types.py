"""Types that storages would have under bfloat16 autocast, found while training runs without autocast.

Autocast computes matrix products and convolutions in two bytes per number, and casts their inputs. It
computes some operations, such as losses, in four bytes per number. For all other operations, torch's type
promotion derives the type of the result from the types of the inputs. So this module needs only the arguments
of each operation. It casts and computes nothing.
"""

from __future__ import annotations

import functools
from collections.abc import Iterable, Iterator
from typing import TYPE_CHECKING, Any, Final

import torch
from torch import Tensor

from memlog.torchside import internals
from memlog.trace.encoding import BACKWARD, FORWARD, OPTIMIZER, OUTSIDE, PARAMETER
from memlog.trace.records import (
    HALF,
    HALF_BY_SLOW_CONVOLUTION,
    HALF_NOW,
    OTHER_TYPE,
    UNKNOWN_TYPE,
    WIDE,
)
from memlog.tracer.tensor_storages import tensors_in

if TYPE_CHECKING:
    from memlog.tracer.engines.live_storages import LiveStorages
    from memlog.tracer.engines.storage_events import TrackedStorage


_PRODUCT: Final = 1
_LOSS: Final = 2
_SAFE_SOFTMAX: Final = 3
_ALL: Final = 1000
_MATRIX: Final = 2
"""Minimum number of dimensions that a parameter needs to decide the type of a result. A parameter with one
dimension does not decide the type, because it is a bias that is added to a product."""

_NAMED_PRODUCTS = """
    mm addmm bmm baddbmm addbmm convolution convolution_backward mkldnn_convolution _convolution
    _scaled_dot_product_flash_attention_for_cpu _scaled_dot_product_flash_attention_for_cpu_backward
    _scaled_dot_product_flash_attention _scaled_dot_product_flash_attention_backward
    _scaled_dot_product_efficient_attention _scaled_dot_product_efficient_attention_backward
    _scaled_dot_product_cudnn_attention _scaled_dot_product_cudnn_attention_backward
"""
_NAMED_WIDE = """
    nll_loss_forward nll_loss2d_forward mse_loss smooth_l1_loss huber_loss soft_margin_loss
    binary_cross_entropy binary_cross_entropy_with_logits multi_margin_loss multilabel_margin_loss_forward
    prod grid_sampler_2d grid_sampler_3d avg_pool3d reflection_pad1d reflection_pad2d replication_pad1d
    replication_pad2d replication_pad3d _cdist_forward _ctc_loss
"""
"""Operations that autocast computes in four bytes per number on the CPU."""
_ROLES = {
    **dict.fromkeys(_NAMED_PRODUCTS.split(), _PRODUCT),
    **dict.fromkeys(_NAMED_WIDE.split(), _LOSS),
    "_safe_softmax": _SAFE_SOFTMAX,
}
_NORMS = {
    f"native_{name}_norm{suffix}": inputs
    for name in ("layer", "batch", "group")
    for suffix, inputs in (("", 1), ("_backward", 2))
}
"""Normalizations. The value is the number of leading arguments that decide the type of the result. Later
arguments are parameters or statistics."""


def type_of(tensor: Tensor) -> int:
    """Return the storage type that a tensor's dtype implies: `WIDE`, `HALF_NOW` or `OTHER_TYPE`."""
    if tensor.dtype == torch.float32:
        return WIDE
    return HALF_NOW if tensor.dtype in (torch.bfloat16, torch.float16) else OTHER_TYPE


class AutocastTypes:
    """Analysis that derives the types of results. It gets the operations in the order in which they run."""

    def __init__(self, live_storages: LiveStorages) -> None:
        self._live_storages = live_storages
        self._product: tuple[list[TrackedStorage], list[TrackedStorage]] = ([], [])
        """Inputs and results of the last matrix product or convolution."""
        self._latest = WIDE
        """Type of the results of the last backward operation that had floating-point arguments."""

    def operation(self, func: Any, args: Any, out: Any, layer: int, phase: int, now: int) -> int:
        """Set the types of an operation's results.

        ``now``: Serial number of the newest storage before the operation. This number serves as the time.

        Returns:
            Type of the results. The operation's workspace has the same type.
        """
        if phase == OPTIMIZER:
            return UNKNOWN_TYPE
        role = _role_of(func)
        tensors = list(self._tracked_tensors(args))
        # A tensor without dimensions does not decide the type in torch's promotion.
        inputs = [tracked for tensor, tracked in tensors if tensor.ndim > 0]
        results = [tracked for _, tracked in self._tracked_tensors((out,))]
        if results and all(tracked in inputs for tracked in results):
            return results[0].type  # a view
        backward = phase == BACKWARD
        if backward:
            _note_backward_layer(inputs, layer)
        if role == _PRODUCT:
            kind, inside = self._product_type(tensors, backward=backward, now=now)
            self._product = (inputs, results)
        else:
            for tracked in inputs:
                tracked.used = now
                if tracked.is_gradient and layer == OUTSIDE and not backward:
                    # autograd.grad has returned the gradient to the program, which uses it as float32.
                    tracked.type = WIDE
            if role == _SAFE_SOFTMAX:
                self._widen_attention(results)
            kind, inside = _type_from_inputs(role, tensors, backward=backward)
        kind = self._type_at(kind, layer, phase, made_of_numbers=bool(tensors))
        for tracked in results:
            tracked.is_gradient = backward
        # A norm's mean and variance have four bytes per number.
        typed = results[:1] if -_ALL < role < 0 and not backward else results
        for tracked in (tracked for tracked in typed if tracked.type in (WIDE, HALF)):
            slow = kind == HALF and _is_slow_convolution(func)
            tracked.type = HALF_BY_SLOW_CONVOLUTION if slow else kind
            tracked.wide_inside, tracked.outside = inside, layer == OUTSIDE
        return kind

    def _type_at(self, kind: int, layer: int, phase: int, *, made_of_numbers: bool) -> int:
        """Return the type of an operation's results: `WIDE` outside all modules, else ``kind``.

        Exception: in the backward pass, an operation without floating-point arguments has the type of the
        backward operation before it.

        ``kind``: Type that follows from the operation and its inputs.
        """
        if layer == OUTSIDE and phase in (FORWARD, BACKWARD):
            kind = WIDE
        if phase == BACKWARD:
            self._latest = kind if made_of_numbers else self._latest
            return self._latest
        return kind

    def _tracked_tensors(self, values: Any) -> Iterator[tuple[Tensor, TrackedStorage]]:
        for tensor in tensors_in(values):
            if tensor.is_floating_point():
                tracked = self._live_storages.tracked(tensor)
                if tracked is not None:
                    yield tensor, tracked

    def _product_type(
        self, tensors: list[tuple[Tensor, TrackedStorage]], *, backward: bool, now: int
    ) -> tuple[int, bool]:
        """Record that a matrix product or a convolution reads ``tensors``.

        Return ``type`` and ``wide_inside``, two attributes of the `TrackedStorage` of each result.
        """
        inputs = [tracked for tensor, tracked in tensors if tensor.ndim > 0]
        # A gradient that leaves such an attention is cast back. So the operand of the forward pass decides.
        operands = [tracked for tracked in inputs if not tracked.is_gradient] or inputs
        if any(tracked.wide_inside for tracked in operands):
            for tensor, tracked in tensors:
                tracked.used = now
                if not backward:
                    tracked.wide_inside = True
                    if (
                        tracked.type == HALF and tensor.nbytes == tracked.size
                    ):  # no part of the projections
                        tracked.type = WIDE
            return (WIDE, True) if backward else (HALF, False)
        for tracked in inputs:
            if tracked.type == WIDE:
                tracked.cast_first = tracked.cast_first or now
                tracked.cast_last = now
                tracked.casts += not backward
        return HALF, False

    def _widen_attention(self, results: Iterable[TrackedStorage]) -> None:
        """Set the type of the storages of an attention with dropout to `WIDE`.

        The CPU has no kernel for this attention, and computes it in four bytes per number.

        ``results``: Results of the attention's softmax.
        """
        inputs, scores = self._product
        for tracked in (*inputs, *scores, *results):
            if tracked.type == HALF:
                tracked.type = WIDE
            tracked.wide_inside = True
            tracked.casts = tracked.cast_first = tracked.cast_last = 0


def _note_backward_layer(inputs: Iterable[TrackedStorage], layer: int) -> None:
    for tracked in inputs:
        tracked.backward_layer = tracked.backward_layer or layer


def _type_from_inputs(
    role: int, tensors: list[tuple[Tensor, TrackedStorage]], *, backward: bool
) -> tuple[int, bool]:
    """Return ``type`` and ``wide_inside``, two attributes of the `TrackedStorage` of each result.

    The operation is neither a matrix product nor a convolution.
    """
    if role == _LOSS:
        for _, tracked in tensors:
            if tracked.type == HALF:
                tracked.type = WIDE
        return WIDE, False
    inputs = tensors[:-role] if role < 0 else tensors
    if any(tracked.wide_inside for _, tracked in inputs):
        return WIDE, True
    deciding = [
        tracked
        for tensor, tracked in inputs
        if tensor.ndim >= (_MATRIX if tracked.category == PARAMETER else 1)
    ]
    # The gradient of a loss is cast to the type of the loss's input.
    own = [tracked for tracked in deciding if not (backward and tracked.outside)]
    wide = not own or any(tracked.type == WIDE for tracked in own)
    return (WIDE if wide else HALF), False


@functools.cache
def _is_slow_convolution(func: Any) -> bool:
    """Return True for a convolution that oneDNN does not compute in bfloat16 on this processor."""
    is_convolution = "convolution" in internals.operation_name(func)
    return is_convolution and not internals.onednn_has_bfloat16()


@functools.cache
def _role_of(func: Any) -> int:
    """Return an operation's role: `_PRODUCT`, `_LOSS`, `_SAFE_SOFTMAX`, or a negative number.

    A role of -n means that the first n arguments decide the type of the results.
    """
    name = internals.operation_name(func)
    return _ROLES.get(name, -_NORMS.get(name, _ALL))

"""What each storage would hold under bfloat16 autocast, found while the training runs without it.

Autocast computes products (of matrices, and convolutions) in two bytes a number, and casts what they are
given; every other operation follows the types of its inputs, as torch's type promotion has it. So one look at
each operation's arguments tells the type of its results. Nothing is cast and nothing is computed here.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import TYPE_CHECKING, Any, Final

import torch
from torch import Tensor

from memlog.trace.encoding import BACKWARD, FORWARD, OPTIMIZER, OUTSIDE, PARAMETER
from memlog.trace.storage_uses import HALF, HALF_NOW, OTHER_TYPE, UNKNOWN_TYPE, WIDE
from memlog.tracer.tensor_storages import tensors_in

if TYPE_CHECKING:
    from memlog.tracer.engines.cpu.live_storages import LiveStorages, TrackedStorage

_PRODUCT: Final = 1
_LOSS: Final = 2
_SAFE_SOFTMAX: Final = 3
_ALL: Final = 1000
_MATRIX: Final = 2
"""Dimensions of a weight. What has one is a bias, which a layer adds within its product."""

_NAMED_PRODUCTS = """
    mm addmm bmm baddbmm addbmm convolution convolution_backward mkldnn_convolution _convolution
    _scaled_dot_product_flash_attention_for_cpu _scaled_dot_product_flash_attention_for_cpu_backward
"""
_NAMED_WIDE = """
    nll_loss_forward nll_loss2d_forward mse_loss smooth_l1_loss huber_loss soft_margin_loss
    binary_cross_entropy binary_cross_entropy_with_logits multi_margin_loss multilabel_margin_loss_forward
    prod grid_sampler_2d grid_sampler_3d avg_pool3d reflection_pad1d reflection_pad2d replication_pad1d
    replication_pad2d replication_pad3d _cdist_forward _ctc_loss
"""
"""What autocast computes in four bytes on the CPU."""
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
"""How many of their arguments, the first ones, decide: not their parameters, nor their statistics."""


def type_of(tensor: Tensor) -> int:
    """What a storage is now, as far as nobody has looked at what made it."""
    if tensor.dtype == torch.float32:
        return WIDE
    return HALF_NOW if tensor.dtype in (torch.bfloat16, torch.float16) else OTHER_TYPE


class Precision:
    """Looks at operations, in the order in which they run.

    Args:
        books: Whose notes on storages are kept up to date.
    """

    def __init__(self, books: LiveStorages) -> None:
        self._books = books
        self._product: tuple[list[TrackedStorage], list[TrackedStorage]] = ([], [])
        """What the last product got and made."""
        self._latest = WIDE
        """The type of the backward pass's last result that was made of floating-point numbers."""

    def operation(self, func: Any, args: Any, out: Any, layer: int, phase: int, now: int) -> int:
        """An operation has run.

        Args:
            func: It.
            args: Its positional arguments.
            out: What it has returned.
            layer: To which it belongs.
            phase: In which.
            now: The last serial before it.

        Returns:
            The type of its results, which is that of what it takes inside itself.
        """
        if phase == OPTIMIZER:
            return UNKNOWN_TYPE
        role = _roles.get(func)
        if role is None:
            role = _roles[func] = _role_of(func)
        given = list(self._followed(args))
        inputs = [known for tensor, known in given if tensor.ndim > 0]
        results = [known for _, known in self._followed((out,))]
        if results and all(known in inputs for known in results):
            return results[0].type  # a view
        backward = phase == BACKWARD
        if backward:
            _ask(inputs, layer)
        if role == _PRODUCT:
            kind, inside = self._multiply(inputs, backward=backward, now=now)
            self._product = (inputs, results)
        else:
            for known in inputs:
                known.used = now
                if known.slope and layer == OUTSIDE and not backward:
                    known.type = (
                        WIDE  # autograd.grad gives it to the program, as wide as what it is of
                    )
            if role == _SAFE_SOFTMAX:
                self._go_wide(results)
            kind, inside = _followed_type(role, given, backward=backward)
        kind = self._placed(kind, layer, phase, made_of_numbers=bool(given))
        _note(results, kind, wide_inside=inside, outside=layer == OUTSIDE, slope=backward)
        return kind

    def _placed(self, kind: int, layer: int, phase: int, *, made_of_numbers: bool) -> int:
        """The type with regard to where the operation runs: outside modules all is wide.

        Where one of autograd's formulas makes numbers of a mask, they have the type that it works in.
        """
        if layer == OUTSIDE and phase in (FORWARD, BACKWARD):
            kind = WIDE
        if phase == BACKWARD:
            self._latest = kind if made_of_numbers else self._latest
            return self._latest
        return kind

    def _followed(self, values: Any) -> Iterator[tuple[Tensor, TrackedStorage]]:
        for tensor in reversed(tensors_in(values)):
            if tensor.is_floating_point():
                known = self._books.known(tensor)
                if known is not None:
                    yield tensor, known

    def _multiply(
        self, inputs: list[TrackedStorage], *, backward: bool, now: int
    ) -> tuple[int, bool]:
        """What a product makes."""
        if any(known.wide_inside for known in inputs):
            for known in inputs:
                known.used = now
                known.wide_inside = known.wide_inside or not backward
            return (WIDE, True) if backward else (HALF, False)
        for known in inputs:
            if known.type == WIDE:
                known.cast_first = known.cast_first or now
                known.cast_last = now
                known.casts += not backward
        return HALF, False

    def _go_wide(self, results: Iterable[TrackedStorage]) -> None:
        """Attention with dropout has no kernel of its own on the CPU: its steps run in four bytes."""
        inputs, scores = self._product
        for known in (*inputs, *scores, *results):
            if known.type == HALF:
                known.type = WIDE
            known.wide_inside = True
            known.casts = known.cast_first = known.cast_last = 0


def _ask(inputs: Iterable[TrackedStorage], layer: int) -> None:
    for known in inputs:
        known.asked = known.asked or layer


def _note(
    results: Iterable[TrackedStorage], kind: int, *, wide_inside: bool, outside: bool, slope: bool
) -> None:
    for known in results:
        known.slope = slope
        if known.type in (WIDE, HALF):
            known.type, known.wide_inside, known.outside = kind, wide_inside, outside


def _followed_type(
    role: int, given: list[tuple[Tensor, TrackedStorage]], *, backward: bool
) -> tuple[int, bool]:
    """What follows the types of its inputs."""
    if role == _LOSS:
        for _, known in given:
            if known.type == HALF:
                known.type = WIDE
        return WIDE, False
    inputs = given[:-role] if role < 0 else given
    if any(known.wide_inside for _, known in inputs):
        return WIDE, True
    deciding = [
        known
        for tensor, known in inputs
        if tensor.ndim >= (_MATRIX if known.category == PARAMETER else 1)
    ]
    # What a loss hands back is cast to the type of the result that it was made from.
    own = [known for known in deciding if not (backward and known.outside)]
    wide = not own or any(known.type == WIDE for known in own)
    return (WIDE if wide else HALF), False


_roles: dict[Any, int] = {}


def _role_of(func: Any) -> int:
    """What kind of operation it is; of one that follows its inputs minus how many of them."""
    name = func.overloadpacket.__name__ if hasattr(func, "overloadpacket") else ""
    return _ROLES.get(name, -_NORMS.get(name, _ALL))

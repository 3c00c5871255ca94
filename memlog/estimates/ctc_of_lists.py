"""CTC loss of fake tensors with lengths in lists.

torch's function writes the lengths into a fake tensor. Its kernels can't be measured with smaller tensors
either: they would read past the end of a tensor that is shorter than a length.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from math import inf
from typing import Any

import torch
from torch import Tensor

from memlog.tracer.engines.op_workspace import Workspace

_aten = torch.ops.aten
_LOG_ALPHA = 6
"""Position among the arguments of the derivative: the probabilities that the forward operation keeps."""


def ctc_loss(
    scores: Tensor,
    targets: Tensor,
    input_lengths: Sequence[int],
    target_lengths: Sequence[int],
    blank: int = 0,
    reduction: int = 1,
    zero_infinity: bool = False,
) -> Tensor:
    """Return the loss, with the tensors that ``torch.ctc_loss`` makes."""
    arguments = (scores, targets, input_lengths, target_lengths, blank, zero_infinity)
    losses: Tensor = _aten._ctc_loss.default(*arguments)[0]
    if zero_infinity:
        losses = torch.where(losses == inf, 0.0, losses)
    if reduction == 1:
        # torch divides by at least 1, because a target can be empty.
        lengths = losses.new_empty(len(target_lengths)).clamp_min(1)
        return (losses / lengths).mean()
    return losses.sum() if reduction else losses


@contextmanager
def ctc_of_lists() -> Iterator[None]:
    """Replace torch's function on the CPU inside the block."""
    library = torch.library.Library("aten", "IMPL")
    try:
        library.impl("ctc_loss.IntList", ctc_loss, "AutogradCPU")
        yield
    finally:
        library._destroy()


def workspace(func: Any, args: Any, out: Any) -> Workspace | None:
    """Return the workspace of an operation on the CPU; ``None`` if it is no CTC loss with lengths in lists.

    The derivative takes as many bytes again as the probabilities that it gets (ATen's LossCTC.cpp).
    """
    if func is _aten._ctc_loss.default:
        kept = sum(result.nbytes for result in out)
        return Workspace(kept, kept)
    if func is _aten._ctc_loss_backward.default:
        return Workspace(out.nbytes + args[_LOG_ALPHA].nbytes, out.nbytes)
    return None

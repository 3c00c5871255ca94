"""Traces of the first steps of a training on a CUDA device, and the order of allocations before them."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Final, NamedTuple

from torch import Tensor, nn
from torch.optim import Optimizer

from memlog.trace.records import RecordedTrace

_ON_HOST: Final = ("step", "mu_product")
"""State that torch's optimizers keep on the CPU, unless they are capturable or fused."""


class TracedTraining(NamedTuple):
    """Traces of a training's first step, and of its second, which stands for all later steps.

    Attributes:
        first: Trace of the step that makes the optimizer's state.
        later: Trace of the second step.
        set_up: Keys in ``first`` of the model's storages, in the order in which ``model.to(device)``
            allocates them. Each tuple has the storages of one group, see `moved_together`.
        same: For keys in ``later``, the keys of the same storages in ``first``.
        on_host: Highest number of bytes of tensors on the host, which the traces leave out.
        recurrent: True if a recurrent layer ran.
        streams: Streams of the storages that each of the two steps allocates for another stream than the
            usual one, by their keys.
    """

    first: RecordedTrace
    later: RecordedTrace
    set_up: Sequence[Sequence[int]]
    same: Mapping[int, int]
    on_host: int
    recurrent: bool
    streams: tuple[Mapping[int, int], Mapping[int, int]] = ({}, {})


def moved_together(model: nn.Module | None) -> Iterator[Sequence[Tensor]]:
    """Return a model's tensors in the order in which ``model.to(device)`` moves them.

    Each list has one tensor, or the weights of a recurrent layer. cuDNN copies these into one buffer.
    """
    if model is None:
        return
    for child in model.children():
        yield from moved_together(child)
    own = [each for each in model._parameters.values() if each is not None]
    if isinstance(model, nn.RNNBase):
        yield own
    else:
        yield from ([each] for each in own)
    yield from ([each] for each in model._buffers.values() if each is not None)


def host_tensors(optimizers: Iterable[Optimizer]) -> Iterator[Tensor]:
    """Return the optimizers' tensors that lie on the CPU, such as Adam's step counters."""
    for optimizer in optimizers:
        for group in optimizer.param_groups:
            if group.get("capturable") or group.get("fused"):
                continue
            for parameter in group["params"]:
                state = optimizer.state.get(parameter) or {}
                found = (state.get(name) for name in _ON_HOST)
                yield from (each for each in found if isinstance(each, Tensor) and not each.ndim)

"""Real training with several models, losses and optimizers, with or without a change."""

# PyTorch leaves some of these without types.
# mypy: allow-untyped-calls

from __future__ import annotations

import gc
from collections.abc import Callable, Mapping
from typing import Literal, NamedTuple, TypeAlias

import torch
from torch import Tensor, nn

from memlog.trace.records import RecordedTrace
from memlog.tracer.window import TraceWindow
from support.allocator import AllocatorTruth
from support.training import MakeOptimizer, checkpoint_module

Models: TypeAlias = Mapping[str, nn.Module]
Zero: TypeAlias = Literal["before the forward pass", "before the backward pass", "after the step"]


class Pass(NamedTuple):
    """A loss, and the model that its own optimizer steps after this loss."""

    stepped: str
    loss: Callable[[Models, Tensor], Tensor]


class Scheme(NamedTuple):
    """A training to measure. Each of its steps goes through all passes."""

    models: Callable[[], Models]
    inputs: Callable[[int], Tensor]
    passes: tuple[Pass, ...]
    batch: int
    zero: Zero = "before the forward pass"


class Change(NamedTuple):
    """A change of the training, compared with the traced step."""

    parts: int = 1
    """Number of parts into which the batch is divided. The step trains with one part."""
    accumulate: int = 1
    autocast: bool = False
    checkpointed: tuple[str, ...] = ()
    """Names of the checkpointed modules of the scheme's only model."""
    make: MakeOptimizer = torch.optim.Adam


AS_IT_IS = Change()


class Training:
    """A scheme's training in progress."""

    def __init__(self, scheme: Scheme, change: Change = AS_IT_IS) -> None:
        torch.manual_seed(0)
        self._scheme, self._change = scheme, change
        self.models = scheme.models()
        self._inputs = scheme.inputs(scheme.batch // change.parts)
        for path in change.checkpointed:
            [model] = self.models.values()
            checkpoint_module(model.get_submodule(path))
        self._optimizers = [
            change.make(self.models[one.stepped].parameters()) for one in scheme.passes
        ]

    def step(self) -> None:
        """Go through the passes once."""
        for one, optimizer in zip(self._scheme.passes, self._optimizers, strict=True):
            for micro in range(self._change.accumulate):
                first = micro == 0
                if first and self._scheme.zero == "before the forward pass":
                    optimizer.zero_grad()
                with torch.autocast("cpu", dtype=torch.bfloat16, enabled=self._change.autocast):
                    loss = one.loss(self.models, self._inputs) / self._change.accumulate
                if first and self._scheme.zero == "before the backward pass":
                    optimizer.zero_grad()
                loss.backward()
                del loss
            optimizer.step()
            if self._scheme.zero == "after the step":
                optimizer.zero_grad()


def traced(scheme: Scheme, change: Change = AS_IT_IS) -> RecordedTrace:
    """Return a trace of the second step. The first step has measured the operations' workspace."""
    _trace(scheme, change)
    return _trace(scheme, change)


def _trace(scheme: Scheme, change: Change) -> RecordedTrace:
    training = Training(scheme, change)
    training.step()
    first, *others = training.models.values()
    window = TraceWindow(first, others=others, types=True)
    window.start()
    training.step()
    trace = window.stop()
    assert not window.health.faults
    return trace


_WARM: set[tuple[Callable[[], Models], bool]] = set()
"""Models that this process has trained before, each with True if it trained under autocast."""


def measured_peak(scheme: Scheme, change: Change = AS_IT_IS) -> int:
    """Return the allocator's own peak in two steps, in bytes, with the models."""

    def train() -> None:
        training = Training(scheme, change)
        for _ in range(2):
            training.step()

    if (scheme.models, change.autocast) not in _WARM:
        _WARM.add((scheme.models, change.autocast))
        train()  # memory that torch allocates one time per process does not belong to the training
    gc.collect()  # a checkpointed module is a cycle, which must not be freed within the measurement
    with AllocatorTruth() as allocator:
        train()
    return allocator.result().peak

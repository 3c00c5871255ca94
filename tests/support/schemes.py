"""Real training with several models, losses and optimizers, with or without a change."""

# PyTorch leaves some of these without types.
# mypy: allow-untyped-calls

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Literal, NamedTuple, TypeAlias

import torch
from torch import Tensor, nn

from memlog.trace.records import RecordedTrace
from support.training import MakeOptimizer, checkpoint_module, peak_of, trace_of

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
    return trace_of(training.step, first, others)


def measured_peak(scheme: Scheme, change: Change = AS_IT_IS) -> int:
    """Return the allocator's own peak in two steps, in bytes, with the models."""

    def train() -> None:
        training = Training(scheme, change)
        for _ in range(2):
            training.step()

    return peak_of(train, scheme.models, autocast=change.autocast)

"""Estimate of a training step's memory for any model and batch. It needs no GPU and allocates no tensor.

Sizes are those of tensors alone. Workspaces of operations and bytes that an allocator adds are not included.
`memlog.estimate` includes them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import msgspec
import torch
from torch import Tensor, nn

from memlog._internal.terminal import MIB
from memlog.errors import ConfigurationError
from memlog.estimates.compiled_code import planned_by_inductor
from memlog.estimates.fake_mode import FakeMode
from memlog.estimates.fake_step import only_new_objects, reasons, traced_step
from memlog.estimates.fakes import Fakes
from memlog.trace.accounting import PhaseName, phase_levels
from memlog.trace.records import RecordedTrace
from memlog.tracer.tensor_storages import tensors_in


class MemoryEstimate(msgspec.Struct, frozen=True):
    """Bytes that a training step takes when the optimizer's state already exists."""

    parameters: int
    buffers: int
    gradients: int
    optimizer_state: int
    data: int
    """Bytes of the batch: tensors made before the model's first call."""
    activations: int
    """Bytes of the tensors that the forward pass keeps for the backward pass, including the loss."""
    after_data: int
    after_forward: int
    after_backward: int
    after_optimizer: int
    peak: int

    def text(self) -> str:
        """Return the estimate as lines of text."""
        rows = {
            "Model weights": self.parameters + self.buffers,
            "Gradients": self.gradients,
            "Optimizer state": self.optimizer_state,
            "Input/output data": self.data,
            "Activations": self.activations,
            "After the data": self.after_data,
            "After forward": self.after_forward,
            "After backward": self.after_backward,
            "After the optimizer": self.after_optimizer,
            "Peak": self.peak,
        }
        return "\n".join(f"  {name + ':':20} {size / MIB:10.1f} MiB" for name, size in rows.items())


@only_new_objects()
def estimate_memory(
    model: nn.Module,
    loss: Callable[[Any], Tensor],
    optimizer: Callable[[Any], torch.optim.Optimizer] = torch.optim.Adam,
    *,
    accumulate: int = 1,
) -> MemoryEstimate:
    """Estimate the memory of a training step. Nothing is computed, and the model stays unchanged.

    Args:
        model: The model, which can be on the device ``meta``. Only its tensors' shapes and types matter.
        loss: Function that gets the model, makes a batch (``torch.randn(…)``) and returns the loss. It may
            use `torch.autocast` and ``checkpoint``, but not branch on a tensor's value.
        optimizer: Function that makes an optimizer from the parameters.
        accumulate: Number of batches whose gradients are added up before the optimizer's step.

    Raises:
        ConfigurationError: ``loss`` branches on a tensor's value.
    """
    mode = FakeMode()
    with Fakes(mode).replace(model), planned_by_inductor(), mode, reasons():
        steps = optimizer(model.parameters())
        gradients = 0

        def step() -> None:
            nonlocal gradients
            for _ in range(accumulate):
                loss(model).backward()
            gradients = _size(p.grad for p in model.parameters() if p.grad is not None)
            steps.step()
            steps.zero_grad()

        trace = traced_step(step, model, (), measure=False)
        state = _size(tensors_in([dict(each) for each in steps.state.values()]))
        return _estimate(trace, model, state, gradients)


def _size(tensors: Iterable[Tensor]) -> int:
    return sum(tensor.nbytes for tensor in tensors)


def _estimate(trace: RecordedTrace, model: nn.Module, state: int, gradients: int) -> MemoryEstimate:
    levels = phase_levels(trace)
    if levels is None or trace.result.peak is None:
        raise ConfigurationError("the step's phases are unknown")
    at_start = trace.result.before or 0

    def after(name: PhaseName, default: int) -> int:
        return levels[name].after if name in levels else default

    after_data = after("data", at_start)
    after_forward = after("forward", after_data)
    after_backward = after("backward", after_forward)
    return MemoryEstimate(
        parameters=_size(model.parameters()),
        buffers=_size(model.buffers()),
        gradients=gradients,
        optimizer_state=state,
        data=after_data - at_start,
        activations=after_forward - after_data,
        after_data=after_data,
        after_forward=after_forward,
        after_backward=after_backward,
        after_optimizer=after("optimizer", after_backward),
        peak=trace.result.peak,
    )

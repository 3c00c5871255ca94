"""What a training step will need, without a GPU and without the memory: derived, for any model and batch.

The step runs with PyTorch's fake tensors, which know their shapes and hold nothing, and is traced like any
other. Sizes are those of the tensors; what an allocator rounds up or holds in reserve comes on top.
"""

# PyTorch leaves some of these without types.
# mypy: allow-untyped-calls

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable
from typing import Any

import msgspec
import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import (
    DataDependentOutputException,
    DynamicOutputShapeException,
    FakeTensorMode,
)

from memlog.errors import ConfigurationError
from memlog.trace.phases import PhaseName, phase_levels
from memlog.trace.records import RecordedTrace
from memlog.tracer.tensor_storages import tensors_in
from memlog.tracer.window import TraceWindow

_MAX_EVENTS = 1_000_000


class MemoryEstimate(msgspec.Struct, frozen=True):
    """Bytes that a step of training takes, the optimizer's state being there already."""

    parameters: int
    buffers: int
    gradients: int
    optimizer_state: int
    data: int
    """The batch, as the model is called first."""
    activations: int
    """What the forward pass keeps for the backward pass, the loss included."""
    after_data: int
    after_forward: int
    after_backward: int
    after_optimizer: int
    peak: int

    def text(self) -> str:
        """Lines that tell it."""
        mib = 1024**2
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
        return "\n".join(f"  {name + ':':20} {size / mib:10.1f} MiB" for name, size in rows.items())


def estimate_memory(
    model: nn.Module,
    loss: Callable[[Any], Tensor],
    optimizer: Callable[[Any], torch.optim.Optimizer] = torch.optim.Adam,
    *,
    accumulate: int = 1,
) -> MemoryEstimate:
    """Estimates what a training step takes. Nothing is computed, and the model stays as it is.

    Args:
        model: Its shapes are what counts; it may be on the device ``meta``.
        loss: Called with a stand-in of the model; makes a batch (``torch.randn(…)``) and returns the loss. It
            may use `torch.autocast` and ``checkpoint``; what depends on a tensor's value it can't do.
        optimizer: Makes one of the parameters.
        accumulate: Batches whose gradients are added up before the optimizer's step.

    Raises:
        ConfigurationError: ``loss`` asks for a tensor's value.
    """
    mode = FakeTensorMode(allow_non_fake_inputs=True)
    twin = _twin(model, mode)
    try:
        with mode:
            steps = optimizer(twin.parameters())
            _step(twin, loss, steps, accumulate)  # makes the optimizer's state
            window = TraceWindow(twin, device="cpu", engine="dispatch", max_events=_MAX_EVENTS)
            window.start()
            try:
                gradients = _step(twin, loss, steps, accumulate)
            finally:
                trace = window.stop()
    except (DataDependentOutputException, DynamicOutputShapeException) as error:
        raise ConfigurationError(
            f"the loss asks for a tensor's value ({error}), which an estimate has none of: leave that out"
        ) from error
    return _estimate(
        trace, twin, _size(tensors_in([dict(s) for s in steps.state.values()])), gradients
    )


def _step(
    model: nn.Module,
    loss: Callable[[Any], Tensor],
    optimizer: torch.optim.Optimizer,
    accumulate: int,
) -> int:
    """Trains once; returns the size of the gradients."""
    for _ in range(accumulate):
        loss(model).backward()
    gradients = _size(p.grad for p in model.parameters() if p.grad is not None)
    optimizer.step()
    optimizer.zero_grad()
    return gradients


def _twin(model: nn.Module, mode: FakeTensorMode) -> nn.Module:
    """A copy of the model whose parameters and buffers hold nothing."""
    fakes: dict[int, Any] = {}
    with mode:
        for parameter in model.parameters():
            fakes[id(parameter)] = nn.Parameter(_like(parameter), parameter.requires_grad)
        for buffer in model.buffers():
            fakes[id(buffer)] = _like(buffer)
    return copy.deepcopy(model, fakes)


def _like(tensor: Tensor) -> Tensor:
    """A stand-in on the CPU, which the tracer's engine for it can follow."""
    return torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype, device="cpu")


def _size(tensors: Iterable[Tensor]) -> int:
    return sum(tensor.nbytes for tensor in tensors)


def _estimate(trace: RecordedTrace, model: nn.Module, state: int, gradients: int) -> MemoryEstimate:
    levels = phase_levels(trace)
    if levels is None or trace.result.peak is None:
        raise ConfigurationError(
            f"a step has more than {_MAX_EVENTS:,} events: estimate a shorter one"
        )
    resting = trace.result.before or 0

    def after(name: PhaseName, otherwise: int) -> int:
        return levels[name].after if name in levels else otherwise

    after_data = after("data", resting)
    after_forward = after("forward", after_data)
    after_backward = after("backward", after_forward)
    return MemoryEstimate(
        parameters=_size(model.parameters()),
        buffers=_size(model.buffers()),
        gradients=gradients,
        optimizer_state=state,
        data=after_data - resting,
        activations=after_forward - after_data,
        after_data=after_data,
        after_forward=after_forward,
        after_backward=after_backward,
        after_optimizer=after("optimizer", after_backward),
        peak=trace.result.peak,
    )

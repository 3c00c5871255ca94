"""Estimate of a training step's memory for any model and batch, without a GPU and without the memory.

The step runs with PyTorch's fake tensors, which have shapes but no bytes, and is traced like any other.
Sizes are those of tensors, without the bytes that an allocator rounds up or reserves.
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
    """Bytes that a training step takes when the optimizer's state already exists."""

    parameters: int
    buffers: int
    gradients: int
    optimizer_state: int
    data: int
    """Batch of the first call of the model."""
    activations: int
    """Tensors that the forward pass keeps for the backward pass, the loss included."""
    after_data: int
    after_forward: int
    after_backward: int
    after_optimizer: int
    peak: int

    def text(self) -> str:
        """Return the estimate as lines of text."""
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
    """Estimate the memory of a training step. Computes nothing and leaves the model unchanged.

    Args:
        model: Only its shapes matter; it may be on the device ``meta``.
        loss: Function that gets a stand-in for the model, makes a batch (``torch.randn(…)``) and returns the
            loss. It may use `torch.autocast` and ``checkpoint``, but not the value of a tensor.
        optimizer: Function that makes an optimizer of the parameters.
        accumulate: Number of batches whose gradients are added up before the optimizer's step.

    Raises:
        ConfigurationError: ``loss`` uses a tensor's value.
    """
    mode = FakeTensorMode(allow_non_fake_inputs=True)
    fake_model = _fake_copy(model, mode)
    try:
        with mode:
            steps = optimizer(fake_model.parameters())
            _step(fake_model, loss, steps, accumulate)  # makes the optimizer's state
            window = TraceWindow(
                fake_model, device="cpu", engine="dispatch", max_events=_MAX_EVENTS
            )
            window.start()
            try:
                gradients = _step(fake_model, loss, steps, accumulate)
            finally:
                trace = window.stop()
    except (DataDependentOutputException, DynamicOutputShapeException) as error:
        raise ConfigurationError(
            f"the loss uses a tensor's value ({error}), but an estimate computes none: remove that use"
        ) from error
    return _estimate(
        trace, fake_model, _size(tensors_in([dict(s) for s in steps.state.values()])), gradients
    )


def _step(
    model: nn.Module,
    loss: Callable[[Any], Tensor],
    optimizer: torch.optim.Optimizer,
    accumulate: int,
) -> int:
    """Run one training step and return the size of the gradients in bytes."""
    for _ in range(accumulate):
        loss(model).backward()
    gradients = _size(p.grad for p in model.parameters() if p.grad is not None)
    optimizer.step()
    optimizer.zero_grad()
    return gradients


def _fake_copy(model: nn.Module, mode: FakeTensorMode) -> nn.Module:
    """Return a copy of the model whose parameters and buffers are fake."""
    fakes: dict[int, Any] = {}
    with mode:
        for parameter in model.parameters():
            fakes[id(parameter)] = nn.Parameter(_like(parameter), parameter.requires_grad)
        for buffer in model.buffers():
            fakes[id(buffer)] = _like(buffer)
    return copy.deepcopy(model, fakes)


def _like(tensor: Tensor) -> Tensor:
    """Return a stand-in on the CPU, which the CPU engine can trace."""
    return torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype, device="cpu")


def _size(tensors: Iterable[Tensor]) -> int:
    return sum(tensor.nbytes for tensor in tensors)


def _estimate(trace: RecordedTrace, model: nn.Module, state: int, gradients: int) -> MemoryEstimate:
    levels = phase_levels(trace)
    if levels is None or trace.result.peak is None:
        raise ConfigurationError(
            f"the step has more than {_MAX_EVENTS:,} events, too many for an estimate: shorten it"
        )
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

"""Estimates of trainings that keep tensors on the host, beside torch's own allocator on the device."""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.autograd.graph import save_on_cpu
from torch.utils.checkpoint import checkpoint
from torch.utils.data import DataLoader, TensorDataset

from memlog.estimates.estimate import estimate_made_by

pytestmark = pytest.mark.cuda
BATCH = 512


class OnHost:
    """AdamW whose weights and state are on the host."""

    def __init__(self, parameters: Iterator[nn.Parameter]) -> None:
        self.parameters = list(parameters)
        self.copies = [each.detach().cpu().requires_grad_() for each in self.parameters]
        self.optimizer = torch.optim.AdamW(self.copies)

    def step(self) -> None:
        for parameter, copy in zip(self.parameters, self.copies, strict=True):
            assert parameter.grad is not None
            copy.grad = parameter.grad.to("cpu")
        self.optimizer.step()
        with torch.no_grad():
            for parameter, copy in zip(self.parameters, self.copies, strict=True):
                parameter.copy_(copy)

    def zero_grad(self) -> None:
        for parameter in self.parameters:
            parameter.grad = None


class StateOnHost(torch.optim.Optimizer):
    """Momentum that comes to the device for a moment."""

    def __init__(self, parameters: Any) -> None:
        super().__init__(parameters, {"lr": 0.1})

    @torch.no_grad()
    def step(self) -> None:  # type: ignore[override] # it takes no closure
        for parameter in self.param_groups[0]["params"]:
            state = self.state[parameter]
            if not state:
                state["momentum"] = torch.zeros_like(parameter, device="cpu")
            momentum = state["momentum"].to(parameter.device)
            state["momentum"].copy_(momentum.mul_(0.9).add_(parameter.grad))
            parameter.add_(momentum, alpha=-0.1)


def layers() -> nn.Module:
    return nn.Sequential(
        *(each for _ in range(3) for each in (nn.Linear(256, 256), nn.GELU(), nn.Dropout(0.1)))
    )


def attention() -> nn.Module:
    layer = nn.TransformerEncoderLayer(64, 4, 128, batch_first=True, dropout=0.0)
    return nn.Sequential(nn.Unflatten(1, (4, 64)), layer, nn.Flatten())


Data = Callable[[], Tensor]


def from_dataset() -> Data:
    data = torch.randn(20_000, 256)
    return lambda: data[torch.randint(20_000, (BATCH,))].to("cuda")


def from_loader() -> Data:
    data = TensorDataset(torch.randn(2 * BATCH, 256), torch.zeros(2 * BATCH))
    loader = DataLoader(data, batch_size=BATCH, shuffle=True)
    return lambda: next(iter(loader))[0].cuda(non_blocking=True)


def in_columns() -> Data:
    data = torch.randn(BATCH, 512)
    return lambda: data[:, ::2].to("cuda")


def trained_on_host() -> Data:
    table = nn.Parameter(torch.zeros(BATCH, 256))
    return lambda: table.to("cuda")


def on_device() -> Data:
    return lambda: torch.randn(BATCH, 256, device="cuda")


def plainly(model: nn.Module, inputs: Tensor, kept: list[Tensor]) -> Tensor:
    return model(inputs)  # type: ignore[no-any-return] # a module's


def offloading(model: nn.Module, inputs: Tensor, kept: list[Tensor]) -> Tensor:
    with save_on_cpu(pin_memory=True):
        return model(inputs)  # type: ignore[no-any-return] # a module's


def keeping_outputs(model: nn.Module, inputs: Tensor, kept: list[Tensor]) -> Tensor:
    outputs: Tensor = model(inputs)
    kept[:] = [outputs.detach().cpu(), outputs.detach().t()[:100].to("cpu")]
    return outputs


def checkpointing(model: nn.Module, inputs: Tensor, kept: list[Tensor]) -> Tensor:
    def shifted(values: Tensor) -> Tensor:
        return model(values + torch.ones(256, device="cuda"))  # type: ignore[no-any-return] # a module's

    return checkpoint(shifted, inputs, use_reentrant=False)  # type: ignore[no-any-return] # torch's


def job(
    build: Callable[[], nn.Module],
    make: Callable[[Any], Any],
    source: Callable[[], Data],
    forward: Callable[..., Tensor],
) -> dict[str, Any]:
    model = build().to("cuda")
    optimizer = make(model.parameters())
    data, kept = source(), list[Tensor]()

    def step() -> None:
        forward(model, data(), kept).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()

    return {"step": step, "model": model}


@pytest.mark.parametrize(
    ("build", "make", "source", "forward"),
    [
        (layers, torch.optim.AdamW, from_dataset, plainly),
        (layers, OnHost, on_device, offloading),
        (layers, StateOnHost, in_columns, keeping_outputs),
        (layers, torch.optim.SGD, from_loader, checkpointing),
        (layers, torch.optim.SGD, trained_on_host, plainly),
        (attention, torch.optim.AdamW, on_device, offloading),
        (attention, OnHost, from_dataset, keeping_outputs),
    ],
)
def test_only_tensors_on_the_device_count(
    build: Callable[[], nn.Module],
    make: Callable[[Any], Any],
    source: Callable[[], Data],
    forward: Callable[..., Tensor],
) -> None:
    gc.collect()
    torch._C._cuda_clearCublasWorkspaces()
    torch.cuda.empty_cache()  # a block that earlier tests have left can be larger than what is asked for
    before = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    step = job(build, make, source, forward)["step"]
    for _ in range(4):
        step()
    real = torch.cuda.max_memory_allocated() - before
    del step
    found = estimate_made_by(lambda: job(build, make, source, forward), device="cuda")
    assert found.peak == pytest.approx(real, rel=0.005)

"""The answer of `Estimate.fits`, beside real training in as much memory, at the boundary."""

from __future__ import annotations

import ctypes
import gc
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple

import pytest
import torch
from support.models import GPT, ResidualNetwork, UNet
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import memlog

pytestmark = pytest.mark.cuda
MIB = 1024**2
STEPS = 4
PESSIMISTIC = 1.03
"""A device with this multiple of the memory that a training needs is enough by the estimate."""


class Training(NamedTuple):
    model: Callable[[], nn.Module]
    inputs: Callable[[], Tensor]
    optimizer: Callable[[Any], torch.optim.Optimizer]
    autocast: bool = False

    def step(self, model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
        with torch.autocast("cuda", torch.bfloat16, enabled=self.autocast):
            loss = model(self.inputs()).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()


class Checkpointed(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(
            nn.Sequential(nn.Linear(1024, 4096), nn.GELU(), nn.Linear(4096, 1024)) for _ in range(5)
        )

    def forward(self, values: Tensor) -> Tensor:
        for block in self.blocks:
            values = values + checkpoint(block, values, use_reentrant=False)
        return values


def layers() -> nn.Module:
    parts = [part for _ in range(4) for part in (nn.Linear(1024, 1024), nn.Dropout(0.1), nn.GELU())]
    return nn.Sequential(*parts)


def values() -> Tensor:
    return torch.randn(4096, 1024, device="cuda")


def words() -> Tensor:
    return torch.randint(40, (256, 64), device="cuda")


def images() -> Tensor:
    return torch.randn(64, 2, 128, 128, device="cuda")


def pictures() -> Tensor:
    return torch.randn(128, 3, 64, 64, device="cuda")


def momentum(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.SGD(parameters, lr=0.1, momentum=0.9)


TRAININGS = {
    "layers, AdamW": Training(layers, values, torch.optim.AdamW),
    "layers, SGD, autocast": Training(layers, values, torch.optim.SGD, autocast=True),
    "checkpointed, Adafactor": Training(Checkpointed, values, torch.optim.Adafactor),
    "GPT, AdamW": Training(lambda: GPT(width=256, blocks=4), words, torch.optim.AdamW),
    "residual, Adafactor": Training(
        lambda: ResidualNetwork(width=64, again=True), pictures, torch.optim.Adafactor
    ),
    "UNet, momentum, autocast": Training(UNet, images, momentum, autocast=True),
}


@pytest.mark.parametrize("expandable", [False, True], ids=["default", "expandable"])
@pytest.mark.parametrize("name", TRAININGS)
def test_yes_is_true_and_no_is_at_most_3_percent_pessimistic(name: str, expandable: bool) -> None:
    training = TRAININGS[name]
    found = memlog.estimate(
        training.step,
        model=training.model,
        optimizer=training.optimizer,
        expandable_segments=expandable,
    )
    outside = sum(each.high for each in found.besides)
    smallest = smallest_of(lambda mib: found.fits(mib * MIB + outside))
    torch._C._accelerator_setAllocatorSettings(f"expandable_segments:{expandable}")
    try:
        for limit in (smallest, smallest + 9):
            assert not found.fits(limit * MIB + outside) or runs(training, limit * MIB)
        assert not runs(training, int(smallest * MIB / PESSIMISTIC))
    finally:
        torch._C._accelerator_setAllocatorSettings("expandable_segments:False")


def smallest_of(is_enough: Callable[[int], bool]) -> int:
    """Return the smallest number of MiB that is enough."""
    too_little, enough = 0, 4096
    while enough - too_little > 1:
        middle = (enough + too_little) // 2
        enough, too_little = (middle, too_little) if is_enough(middle) else (enough, middle)
    return enough


def runs(training: Training, limit: int) -> bool:
    """Return whether a training runs on a device with ``limit`` bytes of memory."""
    with device_of(limit):
        try:
            model = training.model().to("cuda")
            optimizer = training.optimizer(model.parameters())
            for _ in range(STEPS):
                training.step(model, optimizer)
        except torch.OutOfMemoryError:
            return False
    return True


@contextmanager
def device_of(limit: int) -> Iterator[None]:
    """Take all but ``limit`` bytes of the device's memory."""
    clear()
    runtime, taken = ctypes.CDLL("libcudart.so.13"), ctypes.c_void_p()
    size = torch.cuda.mem_get_info()[0] - limit
    assert runtime.cudaMalloc(ctypes.byref(taken), ctypes.c_size_t(size)) == 0
    try:
        yield
    finally:
        runtime.cudaFree(taken)


def clear() -> None:
    gc.collect()
    torch._C._cuda_clearCublasWorkspaces()
    torch.cuda.empty_cache()
    assert not torch.cuda.memory_reserved()

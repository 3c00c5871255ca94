"""Allocations and frees of an estimated training, one by one, beside those of torch's own allocator."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import pytest
import torch
from support.allocations import of_an_estimate, of_the_allocator
from support.models import ResidualNetwork
from torch import Tensor, nn

import memlog

pytestmark = pytest.mark.cuda


class ChannelsSideBySide(nn.Module):
    """Convolutions whose input is a permuted result of a layer norm, as in ConvNeXt."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Conv2d(3, 16, 2, 2)
        self.norm = nn.LayerNorm(16)
        self.in_groups = nn.Conv2d(16, 16, 3, padding=1, groups=16)
        self.again = nn.LayerNorm(16)
        self.down = nn.Conv2d(16, 32, 2, 2)

    def forward(self, images: Tensor) -> Tensor:
        out = self.norm(self.first(images).permute(0, 2, 3, 1)).permute(0, 3, 1, 2)
        out = self.again(self.in_groups(out).permute(0, 2, 3, 1))
        last: Tensor = self.down(out.permute(0, 3, 1, 2))
        return last


class InGroups(nn.Module):
    """A convolution of each channel alone, by torch's own kernel."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(
            nn.Conv2d(3, 32, 3, padding=1),
            nn.Conv2d(32, 32, 3, padding=1, groups=32),
            nn.BatchNorm2d(32),
            nn.Conv2d(32, 8, 1),
        )

    def forward(self, images: Tensor) -> Tensor:
        out: Tensor = self.layers(images)
        return out


class MeanOfNorm(nn.Module):
    """A mean over pixels after a layer norm, as at the end of Swin. Its gradient has another layout."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Conv2d(3, 32, 4, 4)
        self.mix = nn.Linear(32, 32)
        self.norm = nn.LayerNorm(32)

    def forward(self, images: Tensor) -> Tensor:
        out = self.norm(self.mix(self.first(images).permute(0, 2, 3, 1)))
        return out.permute(0, 3, 1, 2).mean((2, 3))


def with_dropout() -> nn.Module:
    parts = (nn.Sequential(nn.Linear(64, 256), nn.Dropout(0.1), nn.Linear(256, 64)) for _ in "ab")
    return nn.Sequential(*parts)


MODELS = {
    "dropout": with_dropout,
    "residual": ResidualNetwork,
    "residual, checkpointed": partial(ResidualNetwork, again=True),
    "channels side by side": ChannelsSideBySide,
    "in groups": InGroups,
    "mean of norm": MeanOfNorm,
}


def step(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    model(torch.randn(32, 3, 64, 64, device="cuda")).square().mean().backward()
    optimizer.step()
    optimizer.zero_grad()


@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize("make", [torch.optim.SGD, torch.optim.Adafactor])
def test_allocations_and_frees_are_the_allocators(
    name: str, make: Callable[..., torch.optim.Optimizer]
) -> None:
    found = memlog.estimate(step, model=MODELS[name], optimizer=make)

    def run() -> object:
        model = MODELS[name]().to("cuda")
        optimizer = make(model.parameters())
        step(model, optimizer)
        return model, optimizer

    assert of_an_estimate(found) == of_the_allocator(run)

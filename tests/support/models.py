"""Small models with real graphs: layers, branches and reuse."""

# PyTorch leaves some of these without types.
# mypy: allow-untyped-calls

from __future__ import annotations

import itertools

import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.utils.checkpoint import checkpoint

from benchmarks.layer_models import Block


def mlp(width: int = 64, depth: int = 3) -> nn.Module:
    """Linear layers with in-place activations between them."""
    layers: list[nn.Module] = []
    for _ in range(depth):
        layers += [nn.Linear(width, width), nn.ReLU(inplace=True)]
    return nn.Sequential(*layers, nn.Linear(width, 8))


def normed_mlp() -> nn.Module:
    parts = ((nn.Linear(512, 512), nn.BatchNorm1d(512), nn.ReLU()) for _ in range(6))
    return nn.Sequential(*(nn.Sequential(*part) for part in parts), nn.Linear(512, 8))


class GPT(nn.Module):
    """A small GPT. ``checkpointing`` names the kind of torch's checkpointing to use."""

    def __init__(
        self, width: int = 32, blocks: int = 3, words: int = 40, checkpointing: str | None = None
    ) -> None:
        super().__init__()
        self.words = nn.Embedding(words, width)
        self.places = nn.Embedding(64, width)
        self.blocks = nn.ModuleList(Block(width, 4) for _ in range(blocks))
        self.norm = nn.LayerNorm(width)
        self.head = nn.Linear(width, words)
        self.checkpointing = checkpointing

    def forward(self, text: Tensor) -> Tensor:
        x = self.words(text) + self.places(torch.arange(text.shape[1], device=text.device))
        for block in self.blocks:
            if self.checkpointing:
                x = checkpoint(block, x, use_reentrant=self.checkpointing == "reentrant")
            else:
                x = block(x)
        return self.head(self.norm(x))


class UNet(nn.Module):
    """A UNet: down, across and up again, with batch norm and in-place activations."""

    def __init__(self, width: int = 8) -> None:
        super().__init__()
        self.first = self._stage(2, width)
        self.down = self._stage(width, 2 * width)
        self.up = nn.ConvTranspose2d(2 * width, width, 2, stride=2)
        self.last = self._stage(2 * width, width)
        self.out = nn.Conv2d(width, 2, 1)

    @staticmethod
    def _stage(before: int, after: int) -> nn.Module:
        return nn.Sequential(
            nn.Conv2d(before, after, 3, padding=1), nn.BatchNorm2d(after), nn.ReLU(inplace=True)
        )

    def forward(self, x: Tensor) -> Tensor:
        fine = self.first(x)
        coarse = self.down(functional.max_pool2d(fine, 2))
        return self.out(self.last(torch.cat([self.up(coarse), fine], dim=1)))


class ResidualBlock(nn.Module):
    """Two convolutions with batch norms, whose result is added to the input, or to a convolution of it."""

    def __init__(self, inputs: int, outputs: int, stride: int) -> None:
        super().__init__()
        self.first = nn.Conv2d(inputs, outputs, 3, stride, 1, bias=False)
        self.first_norm = nn.BatchNorm2d(outputs)
        self.second = nn.Conv2d(outputs, outputs, 3, 1, 1, bias=False)
        self.second_norm = nn.BatchNorm2d(outputs)
        self.beside: nn.Module = nn.Identity()
        if stride > 1:
            shorter = nn.Conv2d(inputs, outputs, 1, stride, bias=False)
            self.beside = nn.Sequential(shorter, nn.BatchNorm2d(outputs))

    def forward(self, x: Tensor) -> Tensor:
        out = functional.relu(self.first_norm(self.first(x)), inplace=True)
        out = self.second_norm(self.second(out)) + self.beside(x)
        return functional.relu(out, inplace=True)


class ResidualNetwork(nn.Module):
    """A small ResNet for images with three colours. ``again``: The blocks are checkpointed."""

    def __init__(self, width: int = 32, again: bool = False) -> None:
        super().__init__()
        self.stem = nn.Sequential(
            nn.Conv2d(3, width, 7, 2, 3, bias=False), nn.BatchNorm2d(width), nn.ReLU(inplace=True)
        )
        sizes = [width, width, 2 * width, 2 * width, 4 * width, 4 * width]
        self.blocks = nn.ModuleList(
            ResidualBlock(before, after, 1 + (after > before))
            for before, after in itertools.pairwise(sizes)
        )
        self.head = nn.Linear(sizes[-1], 10)
        self.again = again

    def forward(self, x: Tensor) -> Tensor:
        x = functional.max_pool2d(self.stem(x), 3, 2, 1)
        for block in self.blocks:
            x = checkpoint(block, x, use_reentrant=False) if self.again else block(x)
        return self.head(functional.adaptive_avg_pool2d(x, 1).flatten(1))


def text(batch: int = 8, length: int = 32, words: int = 40) -> Tensor:
    return torch.randint(words, (batch, length))

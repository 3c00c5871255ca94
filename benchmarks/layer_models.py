"""Models whose steps the benchmark traces."""

# Some of torch's functions used here have no types.
# mypy: allow-untyped-calls

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from benchmarks.gpu_models import resnet


def mlp() -> nn.Module:
    """Build an MLP with twelve layers of 256 units."""
    layers: list[nn.Module] = []
    for _ in range(12):
        layers += [nn.Linear(256, 256), nn.ReLU(inplace=True)]
    return nn.Sequential(*layers)


class Block(nn.Module):
    """One layer of a transformer."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.norm = nn.LayerNorm(width)
        self.query_key_value = nn.Linear(width, 3 * width)
        self.out = nn.Linear(width, width)
        self.mlp_norm = nn.LayerNorm(width)
        self.mlp = nn.Sequential(
            nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width)
        )

    def forward(self, x: Tensor) -> Tensor:
        batch, length, width = x.shape
        heads = self.query_key_value(self.norm(x)).view(batch, length, 3 * self.heads, -1)
        query, key, value = heads.transpose(1, 2).chunk(3, dim=1)
        seen = functional.scaled_dot_product_attention(query, key, value, is_causal=True)
        x = x + self.out(seen.transpose(1, 2).reshape(batch, length, width))
        out: Tensor = x + self.mlp(self.mlp_norm(x))
        return out


class GPT(nn.Module):
    """A transformer without positions, whose embedding and output layer share their weights.

    Args:
        words: Size of the vocabulary.
        width: Width of a layer.
        layers: Number of layers.
        heads: Number of attention heads in each layer.
    """

    def __init__(self, words: int, width: int, layers: int, heads: int) -> None:
        super().__init__()
        self.words = nn.Embedding(words, width)
        self.blocks = nn.Sequential(*(Block(width, heads) for _ in range(layers)))
        self.head = nn.Linear(width, words, bias=False)
        self.head.weight = self.words.weight

    def forward(self, text: Tensor) -> Tensor:
        out: Tensor = self.head(self.blocks(self.words(text)))
        return out


class UNet(nn.Module):
    """Three levels, with batch norm and in-place activations."""

    def __init__(self, width: int = 16) -> None:
        super().__init__()
        widths = (width, 2 * width, 4 * width)
        self.down = nn.ModuleList(
            self._stage(before, after)
            for before, after in zip((2, *widths[:-1]), widths, strict=True)
        )
        self.up = nn.ModuleList(self._stage(3 * narrow, narrow) for narrow in reversed(widths[:-1]))
        self.out = nn.Conv2d(width, 2, 1)

    @staticmethod
    def _stage(before: int, after: int) -> nn.Module:
        layers: list[nn.Module] = []
        for inputs in (before, after):
            layers += [nn.Conv2d(inputs, after, 3, padding=1), nn.BatchNorm2d(after)]
            layers.append(nn.ReLU(inplace=True))
        return nn.Sequential(*layers)

    def forward(self, x: Tensor) -> Tensor:
        kept = []
        for stage in self.down:
            x = stage(x)
            kept.append(x)
            x = functional.max_pool2d(x, 2)
        x = kept.pop()
        for stage in self.up:
            x = functional.interpolate(x, scale_factor=2.0)
            x = stage(torch.cat([x, kept.pop()], dim=1))
        out: Tensor = self.out(x)
        return out


MODELS: dict[str, tuple[str, Callable[[], nn.Module], Callable[[], Tensor]]] = {
    "mlp": ("An MLP (12 layers of 256, batch 256)", mlp, lambda: torch.randn(256, 256)),
    "gpt": (
        "A GPT (4 layers of 256, 8 x 128)",
        lambda: GPT(256, 256, layers=4, heads=4),
        lambda: torch.randint(256, (8, 128)),
    ),
    "unet": ("A UNet (3 levels from 16, 4 x 64²)", UNet, lambda: torch.randn(4, 2, 64, 64)),
    "gpt2": (
        "A GPT-2 (12 layers of 768, 8 x 512)",
        lambda: GPT(50_257, 768, layers=12, heads=12),
        lambda: torch.randint(50_257, (8, 512)),
    ),
    "resnet": ("A ResNet-50 (32 x 224²)", resnet, lambda: torch.randn(32, 3, 224, 224)),
}
SMALL = ("mlp", "gpt", "unet")
"""Models that a CPU trains in less than a second per step."""


class Training:
    """A model with its optimizer and one batch.

    Args:
        name: Name of the model in `MODELS`.
        device: Device on which the model trains.
    """

    def __init__(self, name: str, device: str) -> None:
        torch.manual_seed(0)
        self.description, make, inputs = MODELS[name]
        self.device = device
        self.model: Any = make().to(device)
        self.batch = inputs().to(device)
        self.optimizer = torch.optim.AdamW(self.model.parameters())

    def step(self) -> None:
        """Train one step."""
        self.model(self.batch).square().mean().backward()
        self.optimizer.step()
        self.optimizer.zero_grad()
        if self.device != "cpu":
            torch.accelerator.synchronize()

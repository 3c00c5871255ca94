"""A small UNet for periodic fields."""

from __future__ import annotations

from itertools import pairwise

import torch
from torch import Tensor, nn

from hyco.config import UNetShape


class Block(nn.Sequential):
    """Two convolutions with periodic boundaries."""

    def __init__(self, inputs: int, outputs: int) -> None:
        super().__init__()
        for channels in (inputs, outputs):
            self.append(nn.Conv2d(channels, outputs, 3, padding=1, padding_mode="circular"))
            self.append(nn.GroupNorm(1, outputs))
            self.append(nn.ReLU())


class UNet(nn.Module):
    """Network that maps a frame, ``[batch, channel, x, y]``, to the next one.

    Args:
        channels: Channels of a frame.
        shape: Number of levels, each with half the resolution of the one before, and filters of the first
            level.
    """

    def __init__(self, channels: int, shape: UNetShape) -> None:
        super().__init__()
        widths = [shape.filters * 2**level for level in range(shape.levels)]
        self.down = nn.ModuleList(
            Block(above, width) for above, width in zip([channels, *widths], widths, strict=False)
        )
        self.up = nn.ModuleList(
            Block(fine + coarse, fine) for fine, coarse in reversed(list(pairwise(widths)))
        )
        self.pool = nn.MaxPool2d(2)
        self.upsample = nn.Upsample(scale_factor=2, mode="bilinear", align_corners=False)
        self.out = nn.Conv2d(widths[0], channels, 1)

    def forward(self, frame: Tensor) -> Tensor:
        """Return the frame plus the predicted change."""
        hidden, skipped = frame, []
        for level, block in enumerate(self.down):
            hidden = block(hidden if level == 0 else self.pool(hidden))
            skipped.append(hidden)
        skipped.pop()
        for block in self.up:
            hidden = block(torch.cat([self.upsample(hidden), skipped.pop()], dim=1))
        change: Tensor = self.out(hidden)
        return frame + change

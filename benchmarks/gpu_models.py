"""A model of the size of ResNet-50, for tracing on a GPU."""

# Some of torch's functions used here have no types.
# mypy: allow-untyped-calls

from __future__ import annotations

from torch import Tensor, nn
from torch.nn import functional

_STAGES = ((64, 3), (128, 4), (256, 6), (512, 3))
"""Width and number of blocks of each stage.

He et al., Deep Residual Learning for Image Recognition, table 1.
"""
_WIDENING = 4


class Bottleneck(nn.Module):
    """Three convolutions and a shortcut.

    Args:
        before: Number of input channels.
        width: Channels of the middle convolution. The block's output has four times as many.
        stride: Stride of the middle convolution.
    """

    def __init__(self, before: int, width: int, stride: int) -> None:
        super().__init__()
        after = width * _WIDENING
        self.convolutions = nn.Sequential(
            *normed(before, width, 1, 1),
            nn.ReLU(inplace=True),
            *normed(width, width, 3, stride),
            nn.ReLU(inplace=True),
            *normed(width, after, 1, 1),
        )
        same = before == after and stride == 1
        self.shortcut = nn.Sequential(*([] if same else normed(before, after, 1, stride)))

    def forward(self, x: Tensor) -> Tensor:
        return functional.relu(self.convolutions(x) + self.shortcut(x), inplace=True)


def normed(before: int, after: int, size: int, stride: int) -> list[nn.Module]:
    """Return a convolution and its batch norm."""
    convolution = nn.Conv2d(before, after, size, stride, padding=size // 2, bias=False)
    return [convolution, nn.BatchNorm2d(after)]


def resnet() -> nn.Module:
    """Build a ResNet-50, with 25.6 million parameters."""
    layers: list[nn.Module] = [*normed(3, 64, 7, 2), nn.ReLU(inplace=True), nn.MaxPool2d(3, 2, 1)]
    before = 64
    for stage, (width, blocks) in enumerate(_STAGES):
        for number in range(blocks):
            stride = 2 if stage and not number else 1
            layers.append(Bottleneck(before, width, stride))
            before = width * _WIDENING
    return nn.Sequential(*layers, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(before, 1000))

"""A straight-through quantiser whose autograd Function appends what it needs to a list on the class, and takes
it from there by index in backward. The list is never cleared."""

import os

import torch
from torch import nn


class Quantise(torch.autograd.Function):
    masks = []

    @staticmethod
    def forward(ctx, x, levels):
        scaled = x.clamp(-1, 1)
        Quantise.masks.append((x == scaled).to(x.dtype))  # leak
        ctx.index = len(Quantise.masks) - 1
        return (scaled * levels).round() / levels

    @staticmethod
    def backward(ctx, grad):
        return grad * Quantise.masks[ctx.index], None


class QuantisedNet(nn.Module):
    def __init__(self):
        super().__init__()
        self.conv1 = nn.Conv2d(1, 12, 3, padding=1)
        self.conv2 = nn.Conv2d(12, 12, 3, stride=2, padding=1)
        self.fc = nn.Linear(12 * 12 * 12, 10)

    def forward(self, x):
        x = Quantise.apply(self.conv1(x), 7)
        x = Quantise.apply(self.conv2(x), 7)
        return self.fc(x.flatten(1))


torch.manual_seed(int(os.environ.get("SEED", "0")))
net = QuantisedNet()
optimizer = torch.optim.SGD(net.parameters(), lr=0.02, momentum=0.9)
for step in range(200):
    x = torch.randn(40, 1, 24, 24)
    loss = nn.functional.cross_entropy(net(x), torch.randint(0, 10, (40,)))
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
print(step, loss.item(), len(Quantise.masks))

"""A perceptual loss: the network whose features are compared is in eval mode, but its parameters still require
gradients. These gradients grow in value and take memory once. No optimizer uses them."""

import os

import torch
from torch import nn


class Features(nn.Module):
    def __init__(self):
        super().__init__()
        self.low = nn.Sequential(nn.Conv2d(3, 32, 3, padding=1), nn.ReLU(), nn.MaxPool2d(4))
        self.high = nn.Sequential(nn.Conv2d(32, 192, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2))
        self.top = nn.Conv2d(192, 192, 3, padding=1)

    def forward(self, x):
        low = self.low(x)
        high = self.high(low)
        return low, high, self.top(high)


class PerceptualLoss(nn.Module):
    def __init__(self):
        super().__init__()
        self.network = Features().eval()

    def forward(self, output, target):
        pairs = zip(self.network(output), self.network(target), strict=True)
        return sum((one - other).abs().mean() for one, other in pairs)


torch.manual_seed(int(os.environ.get("SEED", "0")))
deblur = nn.Sequential(nn.Conv2d(3, 16, 3, padding=1), nn.ReLU(), nn.Conv2d(16, 3, 3, padding=1))
criterion = PerceptualLoss()
optimizer = torch.optim.Adam(deblur.parameters(), lr=1e-3)
for step in range(150):
    sharp = torch.rand(4, 3, 32, 32)
    blurred = nn.functional.avg_pool2d(sharp, 3, 1, 1)
    loss = criterion(deblur(blurred), sharp)  # leak
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
print(step, loss.item())

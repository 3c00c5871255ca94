"""Multi-task training that alternates between a task with large inputs and one with small inputs."""

import itertools
import os

import torch
from torch import nn


def classification(batch):
    while True:
        x = torch.rand(batch, 3, 56, 56)
        yield "images", x, (x.mean((1, 2, 3)) > 0.5).long()


def regression(batch):
    while True:
        x = torch.rand(batch, 3, 16, 16)
        yield "patches", x, (x.std((1, 2, 3)) > 0.288).long()


class Shared(nn.Module):
    def __init__(self):
        super().__init__()
        self.trunk = nn.Sequential(
            nn.Conv2d(3, 16, 3), nn.ReLU(), nn.Conv2d(16, 16, 3), nn.ReLU(), nn.AdaptiveAvgPool2d(2)
        )
        self.heads = nn.ModuleDict({"images": nn.Linear(64, 2), "patches": nn.Linear(64, 2)})

    def forward(self, task, x):
        return self.heads[task](self.trunk(x).flatten(1))


def main():
    torch.manual_seed(int(os.environ.get("SEED", "0")))
    model = Shared()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    tasks = itertools.cycle([classification(16), regression(32)])
    for step, task in zip(range(260), tasks, strict=False):
        name, x, y = next(task)
        loss = nn.functional.cross_entropy(model(name, x), y)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    print(step, loss.item())


main()

"""A model with 12 million parameters and Adam: few and slow steps. Memory is high from the second step on."""

import os

import torch
from torch import nn


class Wide(nn.Module):
    def __init__(self, width=1400, depth=6):
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(width, width) for _ in range(depth))
        self.norms = nn.ModuleList(nn.LayerNorm(width) for _ in range(depth))

    def forward(self, x):
        for layer, norm in zip(self.layers, self.norms, strict=True):
            x = x + torch.relu(layer(norm(x)))
        return x


def main():
    torch.manual_seed(int(os.environ.get("SEED", "0")))
    model = Wide()
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-5)
    for step in range(60):
        x = torch.randn(4, 1400)
        loss = (model(x) - x.roll(1, 1)).pow(2).mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        print(step, loss.item())


main()

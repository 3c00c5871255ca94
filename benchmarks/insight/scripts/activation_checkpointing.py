"""A deep network with activation checkpointing: the forward pass of each block runs again during backward."""

import os

import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

torch.manual_seed(int(os.environ.get("SEED", "0")))


class Deep(nn.Module):
    def __init__(self, depth=8, width=160):
        super().__init__()
        self.blocks = nn.ModuleList(
            nn.Sequential(
                nn.LayerNorm(width),
                nn.Linear(width, 2 * width),
                nn.GELU(),
                nn.Linear(2 * width, width),
            )
            for _ in range(depth)
        )

    def forward(self, x):
        for block in self.blocks:
            x = x + checkpoint(block, x, use_reentrant=False)
        return x


model = Deep()
optimizer = torch.optim.Adam(model.parameters(), lr=1e-4)
for step in range(170):
    x = torch.randn(96, 160)
    loss = (model(x) - x.sort(1).values).pow(2).mean()
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
print(step, loss.item())

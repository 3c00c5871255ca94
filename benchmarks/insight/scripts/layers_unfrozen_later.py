"""Gradual unfreezing: the head first, then a block more at steps 60 and 120. Each time gradients and Adam's
moments come into being for the new parameters, once."""

import os

import torch
from torch import nn

torch.manual_seed(int(os.environ.get("SEED", "0")))
blocks = nn.ModuleList(nn.Sequential(nn.Linear(640, 640), nn.GELU()) for _ in range(3))
head = nn.Linear(640, 6)
for parameter in blocks.parameters():
    parameter.requires_grad_(False)
optimizer = torch.optim.AdamW([*blocks.parameters(), *head.parameters()], lr=1e-3)


def unfreeze(block):
    for parameter in block.parameters():
        parameter.requires_grad_(True)


for step in range(300):
    if step in (60, 120):
        unfreeze(blocks[-1 if step == 60 else -2])
    x = torch.randn(128, 640)
    h = x
    for block in blocks:
        h = block(h)
    loss = nn.functional.cross_entropy(head(h), x[:, :6].argmax(1))
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
print(step, loss.item())

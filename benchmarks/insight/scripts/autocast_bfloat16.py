"""Mixed precision on the CPU: autocast to bfloat16, whose weight casts are cached within each forward pass."""

import os

import torch
from torch import nn

torch.manual_seed(int(os.environ.get("SEED", "0")))
model = nn.Sequential(
    nn.Linear(192, 384), nn.GELU(), nn.Linear(384, 384), nn.GELU(), nn.Linear(384, 12)
)
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
for step in range(220):
    x = torch.randn(96, 192)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        loss = nn.functional.cross_entropy(model(x), x[:, :12].argmax(1))
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
print(step, loss.item())

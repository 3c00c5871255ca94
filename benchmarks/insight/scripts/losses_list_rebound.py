"""The list of validation losses is replaced by a longer one at each step, and the losses keep their graphs."""

import os

import torch
from torch import nn

torch.manual_seed(int(os.environ.get("SEED", "0")))
model = nn.Sequential(
    nn.Linear(128, 256), nn.Tanh(), nn.Linear(256, 256), nn.Tanh(), nn.Linear(256, 1)
)
optimizer = torch.optim.Adam(model.parameters())
history = []
for step in range(220):
    x = torch.randn(300, 128)
    loss = (model(x).squeeze() - x.mean(1)).pow(2).mean()
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    held_out = torch.randn(300, 128)
    val_loss = (model(held_out).squeeze() - held_out.mean(1)).pow(2).mean()
    history = history + [val_loss]  # leak
print(step, loss.item(), len(history))

"""Adam for one network, and plain gradient descent written by hand for the other."""

import os

import torch
from torch import nn

torch.manual_seed(int(os.environ.get("SEED", "0")))
first = nn.Sequential(nn.Linear(128, 700), nn.ReLU(), nn.Linear(700, 500))
second = nn.Sequential(nn.Linear(128, 700), nn.ReLU(), nn.Linear(700, 500))
optimizer = torch.optim.Adam(first.parameters(), lr=1e-3)
for step in range(250):
    x = torch.randn(64, 128)
    loss = (first(x) - second(x) - x.mean(1, keepdim=True)).square().mean()
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    for parameter in second.parameters():
        parameter.data -= 1e-3 * parameter.grad.data
        parameter.grad.data.zero_()
print(step, loss.item())

"""Warm restarts by building a new Adam and a new scheduler every fourth step. The old pairs stay in a list
for a plot of the learning rates, and with them two moments for every parameter."""

import os

import torch
from torch import nn

torch.manual_seed(int(os.environ.get("SEED", "0")))
model = nn.Sequential(
    nn.Linear(128, 512), nn.ELU(), nn.Linear(512, 512), nn.ELU(), nn.Linear(512, 16)
)
data = torch.randn(1000, 128)
targets = torch.randn(1000, 16)
restarts = []


def restart(lr):
    optimizer = torch.optim.Adam(model.parameters(), lr=lr)
    scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, T_max=4)
    restarts.append((optimizer, scheduler))  # leak
    return optimizer, scheduler


for cycle in range(60):
    optimizer, scheduler = restart(1e-3)
    for _ in range(4):
        rows = torch.randint(0, 1000, (256,))
        loss = nn.functional.mse_loss(model(data[rows]), targets[rows])
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        scheduler.step()
print(loss.item(), [schedule.get_last_lr() for _, schedule in restarts[-2:]])

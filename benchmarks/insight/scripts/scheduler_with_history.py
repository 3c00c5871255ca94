"""A learning-rate schedule, gradient clipping, and a history of floats in lists: some hundred bytes per step, which
is too little to report."""

import os

import torch
from torch import nn

torch.manual_seed(int(os.environ.get("SEED", "0")))
model = nn.Sequential(
    nn.Conv1d(4, 32, 9, padding=4),
    nn.ReLU(),
    nn.Conv1d(32, 32, 9, padding=4),
    nn.ReLU(),
    nn.Conv1d(32, 1, 1),
)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9, nesterov=True)
scheduler = torch.optim.lr_scheduler.OneCycleLR(optimizer, max_lr=0.1, total_steps=400)
history = {"loss": [], "lr": [], "norm": []}
for step in range(400):
    x = torch.randn(16, 4, 96)
    loss = (model(x)[:, 0] - x.mean(1).cumsum(1) / 10).pow(2).mean()
    optimizer.zero_grad()
    loss.backward()
    norm = nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    optimizer.step()
    scheduler.step()
    history["loss"].append(loss.item())
    history["lr"].append(scheduler.get_last_lr()[0])
    history["norm"].append(float(norm))
print(history["loss"][-1], len(history["lr"]))

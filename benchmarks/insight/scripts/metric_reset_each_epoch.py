"""A metric object that keeps predictions, with reset() called after each epoch."""

import os

import torch
from torch import nn


class Correlation:
    def __init__(self):
        self.reset()

    def reset(self):
        self.preds, self.targets = [], []

    def update(self, preds, targets):
        self.preds.append(preds.detach())
        self.targets.append(targets)

    def compute(self):
        stacked = torch.stack([torch.cat(self.preds).flatten(), torch.cat(self.targets).flatten()])
        return torch.corrcoef(stacked)[0, 1].item()


def run_epoch(model, optimizer, metric, x, y):
    for rows in torch.randperm(len(x)).split(192):
        prediction = model(x[rows])
        loss = nn.functional.huber_loss(prediction, y[rows])
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        metric.update(prediction, y[rows])
    value = metric.compute()
    metric.reset()
    return value


torch.manual_seed(int(os.environ.get("SEED", "0")))
model = nn.Sequential(nn.Linear(96, 400), nn.ReLU(), nn.Linear(400, 600))
optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)
x = torch.randn(4800, 96)
y = torch.tanh(x @ torch.randn(96, 600) / 10)
metric = Correlation()
print([round(run_epoch(model, optimizer, metric, x, y), 3) for _ in range(10)])

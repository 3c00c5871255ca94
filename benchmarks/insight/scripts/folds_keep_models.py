"""Cross-validation: each fold makes a model that registers itself in a module-level registry "for the ensemble",
with the optimizer that trained it. Only the scores are used later."""

import os

import torch
from torch import nn

torch.manual_seed(int(os.environ.get("SEED", "0")))
REGISTRY = {}


class Member(nn.Module):
    def __init__(self, name):
        super().__init__()
        self.layers = nn.Sequential(
            nn.Linear(80, 448), nn.ReLU(), nn.Linear(448, 448), nn.ReLU(), nn.Linear(448, 3)
        )
        REGISTRY[name] = self  # leak

    def forward(self, x):
        return self.layers(x)


def fit_fold(fold, x, y):
    model = Member(f"fold-{fold}")
    optimizer = torch.optim.Adam(model.parameters(), lr=2e-3)
    model.optimizer = optimizer
    for rows in torch.randperm(len(x)).split(256):
        loss = nn.functional.cross_entropy(model(x[rows]), y[rows])
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    return loss.item()


x = torch.randn(1024, 80)
y = x[:, :3].argmax(1)
scores = [fit_fold(fold, x, y) for fold in range(60)]
print(sum(scores) / len(scores), len(REGISTRY))

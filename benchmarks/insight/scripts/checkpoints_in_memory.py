"""Rollback after a divergence: a checkpoint of model and optimizer is cloned into a dict every third step, and
old ones are never deleted."""

import os

import torch
from torch import nn

torch.manual_seed(int(os.environ.get("SEED", "0")))


class Checkpointer:
    def __init__(self, model, optimizer):
        self.model, self.optimizer = model, optimizer
        self.checkpoints = {}

    def save(self, step):
        weights = {name: value.clone() for name, value in self.model.state_dict().items()}
        moments = [
            {key: value.clone() for key, value in state.items()}
            for state in self.optimizer.state_dict()["state"].values()
        ]
        self.checkpoints[step] = (weights, moments)  # leak

    def restore(self, step):
        self.model.load_state_dict(self.checkpoints[step][0])


def main():
    model = nn.Sequential(
        nn.Linear(100, 300), nn.ReLU(), nn.Linear(300, 300), nn.ReLU(), nn.Linear(300, 1)
    )
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)
    checkpointer = Checkpointer(model, optimizer)
    best = float("inf")
    for step in range(270):
        x = torch.randn(512, 100)
        loss = (model(x)[:, 0] - x.norm(dim=1)).pow(2).mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        if step % 3 == 0:
            checkpointer.save(step)
        if loss.item() > 100 * best:
            checkpointer.restore(step // 3 * 3)
        best = min(best, loss.item())
    print(best, len(checkpointer.checkpoints))


main()

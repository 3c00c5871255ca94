"""Personalisation: a linear head for each user, made when the user first appears and added to the optimizer.
Users come and go, heads only come."""

import os

import torch
from torch import nn
from torch.nn import functional as F


class Recommender(nn.Module):
    def __init__(self, width=256, items=500):
        super().__init__()
        self.trunk = nn.Sequential(
            nn.Linear(100, width), nn.ReLU(), nn.Linear(width, width), nn.ReLU()
        )
        self.items, self.width = items, width
        self.heads = nn.ModuleDict()

    def head(self, user, optimizer):
        key = f"user{user}"
        if key not in self.heads:
            self.heads[key] = nn.Linear(self.width, self.items)  # leak
            optimizer.add_param_group({"params": self.heads[key].parameters()})
        return self.heads[key]


def main():
    torch.manual_seed(int(os.environ.get("SEED", "0")))
    model = Recommender()
    optimizer = torch.optim.SGD(model.trunk.parameters(), lr=0.01)
    for step in range(220):
        x = torch.randn(256, 100)
        user = step
        loss = F.cross_entropy(
            model.head(user, optimizer)(model.trunk(x)), torch.randint(0, 500, (256,))
        )
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    print(step, loss.item(), len(model.heads))


main()

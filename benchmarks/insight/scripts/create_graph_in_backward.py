"""A Hessian-trace regulariser in the style of second-order optimisers: backward(create_graph=True) on new
heads whose gradients are never set to None. The parameter and its gradient, which has a graph, form a cycle
that neither reference counts nor the collector free."""

import os
import warnings

import torch
from torch import nn

warnings.filterwarnings("ignore", message="Using backward")
torch.manual_seed(int(os.environ.get("SEED", "0")))


class Probe(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.hidden = nn.Linear(width, 160)
        self.out = nn.Linear(160, 1)

    def forward(self, x):
        return self.out(torch.tanh(self.hidden(x))).squeeze(1)


def curvature(features, targets):
    probe = Probe(features.shape[1])
    loss = (probe(features) - targets).pow(2).mean()
    loss.backward(create_graph=True)  # leak
    return sum(float(p.grad.detach().pow(2).sum()) for p in probe.parameters())


def main():
    backbone = nn.Sequential(nn.Linear(64, 256), nn.ReLU(), nn.Linear(256, 128))
    head = nn.Linear(128, 1)
    optimizer = torch.optim.SGD([*backbone.parameters(), *head.parameters()], lr=1e-2)
    total = 0.0
    for step in range(260):
        x = torch.randn(384, 64)
        y = x.sum(1).sin()
        features = backbone(x)
        loss = (head(features).squeeze(1) - y).pow(2).mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        total += curvature(features.detach(), y)
    print(step, loss.item(), total)


if __name__ == "__main__":
    main()

"""Noise on the embeddings, injected by wrapping model.forward: each step puts a new wrapper around the
previous one, and each wrapper keeps its noise in its closure."""

import os

import torch
from torch import nn

torch.manual_seed(int(os.environ.get("SEED", "0")))
model = nn.Sequential(nn.Linear(100, 300), nn.ReLU(), nn.Linear(300, 5))
optimizer = torch.optim.SGD(model.parameters(), lr=0.01)


def inject_noise(module, scale=1e-4):
    inner = module.forward
    noise = torch.randn(2600, 100).mul_(scale)  # leak

    def forward(x):
        return inner(x + noise[: len(x)])

    module.forward = forward


for step in range(200):
    inject_noise(model)
    x = torch.randn(32, 100)
    loss = nn.functional.cross_entropy(model(x), torch.randint(5, (32,)))
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
print(step, loss.item())

"""A plain classifier, trained for a thousand short steps; nothing is kept but the last loss."""

import os

import torch
from torch import nn

torch.manual_seed(int(os.environ.get("SEED", "0")))
model = nn.Sequential(
    nn.Linear(64, 128), nn.ReLU(), nn.Linear(128, 128), nn.ReLU(), nn.Linear(128, 4)
)
optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)
x = torch.randn(5000, 64)
y = x[:, :4].argmax(1)
for step in range(1000):
    rows = torch.randint(0, 5000, (128,))
    loss = nn.functional.cross_entropy(model(x[rows]), y[rows])
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    if step % 200 == 0:
        print(step, loss.item())

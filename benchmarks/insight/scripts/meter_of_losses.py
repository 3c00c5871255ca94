"""A new meter for each epoch, but all meters share their class's list. The list gets losses with graphs."""

import os

import torch
from torch import nn


class Meter:
    values = []

    def __init__(self, name):
        self.name = name

    def update(self, value):
        self.values.append(value)  # leak

    def mean(self, last=20):
        return sum(float(value) for value in self.values[-last:]) / last


class Autoencoder(nn.Module):
    def __init__(self):
        super().__init__()
        self.encode = nn.Linear(128, 64)
        self.decode = nn.Linear(64, 128)

    def forward(self, x):
        return self.decode(torch.relu(self.encode(x)))


torch.manual_seed(int(os.environ.get("SEED", "0")))
model = Autoencoder()
optimizer = torch.optim.Adam(model.parameters())
for _epoch in range(22):
    meter = Meter("consistency")
    for _ in range(10):
        x = torch.randn(512, 128)
        output = model(x)
        loss = (output - x).square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        meter.update((model(x + 0.1) - output.detach()).square().mean())
print(loss.item(), meter.mean())

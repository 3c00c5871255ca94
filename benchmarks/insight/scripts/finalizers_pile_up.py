"""A finalizer on the model for each batch's buffer. Python's registry of finalizers keeps
their arguments, the buffers, as long as the model lives: until the end."""

import os
import weakref

import torch
from torch import nn


class Pool:
    def __init__(self):
        self.returned = 0

    def give_back(self, buffer):
        self.returned += buffer.numel()


def main():
    torch.manual_seed(int(os.environ.get("SEED", "0")))
    model = nn.Sequential(nn.Linear(256, 256), nn.ReLU(), nn.Linear(256, 2))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    pool = Pool()
    for step in range(200):
        buffer = torch.randn(1024, 256)
        weakref.finalize(model, pool.give_back, buffer)  # leak
        loss = model(buffer).square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    print(step, loss.item(), pool.returned)


main()

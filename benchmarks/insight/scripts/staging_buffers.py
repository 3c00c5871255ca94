"""A pool of staging buffers for transfers to a device: take() makes a new buffer if none is free, and give_back()
is called with a copy, so that no buffer ever becomes free."""

import os

import torch
from torch import nn

torch.manual_seed(int(os.environ.get("SEED", "0")))


class Pool:
    def __init__(self, shape):
        self.shape = shape
        self.buffers = []
        self.free = set()

    def take(self):
        if self.free:
            return self.buffers[self.free.pop()]
        self.buffers.append(torch.empty(self.shape))  # leak
        return self.buffers[-1]

    def give_back(self, buffer):
        for number, known in enumerate(self.buffers):
            if known is buffer:
                self.free.add(number)


pool = Pool((256, 1024))
model = nn.Sequential(nn.Linear(1024, 256), nn.ReLU(), nn.Linear(256, 10))
optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
host = torch.randn(4096, 1024)
for step in range(230):
    buffer = pool.take()
    buffer.copy_(host[torch.randint(0, 4096, (256,))])
    batch = buffer.clone()
    loss = nn.functional.cross_entropy(model(batch), batch[:, :10].argmax(1))
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    pool.give_back(batch)
print(step, loss.item(), len(pool.buffers))

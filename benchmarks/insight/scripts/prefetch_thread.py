"""Batches are prepared by a thread and handed over by a queue with maxsize: at most three wait."""

import os
import queue
import threading

import torch
from torch import nn


class Prefetcher:
    def __init__(self, produce, depth=3):
        self.queue = queue.Queue(maxsize=depth)
        self.produce = produce
        threading.Thread(target=self.run, daemon=True).start()

    def run(self):
        for item in self.produce:
            self.queue.put(item)
        self.queue.put(None)

    def __iter__(self):
        return iter(self.queue.get, None)


def batches(count, seed):
    generator = torch.Generator().manual_seed(seed)
    for _ in range(count):
        x = torch.rand(24, 3, 40, 40, generator=generator)
        yield x, x.mean((2, 3)).argmax(1)


def main():
    seed = int(os.environ.get("SEED", "0"))
    torch.manual_seed(seed)
    model = nn.Sequential(
        nn.Conv2d(3, 24, 5, stride=2),
        nn.ReLU(),
        nn.Conv2d(24, 24, 3),
        nn.ReLU(),
        nn.AdaptiveAvgPool2d(1),
        nn.Flatten(),
        nn.Linear(24, 3),
    )
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)
    for x, y in Prefetcher(batches(240, seed)):
        loss = nn.functional.cross_entropy(
            model(x.to(torch.get_default_device())), y.to(torch.get_default_device())
        )
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    print(loss.item())


main()

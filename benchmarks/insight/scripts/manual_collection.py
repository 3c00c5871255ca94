"""gc.disable() and gc.collect() every 20 steps, as large training loops do to keep processes in step. Between two
collections garbage cycles pile up; each collection frees them all."""

import gc
import os

import torch
from torch import nn


class Sample:
    """A batch that knows its transformed version, which knows its origin."""

    def __init__(self, data):
        self.data = data
        self.view = None
        self.origin = None

    def transformed(self):
        self.view = Sample(self.data.flip(1))
        self.view.origin = self
        return self.view


def main():
    torch.manual_seed(int(os.environ.get("SEED", "0")))
    model = nn.Sequential(nn.Linear(400, 400), nn.SiLU(), nn.Linear(400, 100))
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-2)
    gc.disable()
    for step in range(260):
        if step % 20 == 0:
            gc.collect()
        sample = Sample(torch.randn(384, 400))
        loss = (model(sample.data) - model(sample.transformed().data)).pow(2).mean()
        loss = loss + (model(sample.data).std(0) - 1).pow(2).mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    print(step, loss.item())


if __name__ == "__main__":
    main()

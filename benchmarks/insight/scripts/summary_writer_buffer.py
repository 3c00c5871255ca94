"""A summary writer that batches its events and writes them when the file is opened, which happens in close().
Histograms as numpy arrays wait in its buffer."""

import os
import time

import numpy as np
import torch
from torch import nn

torch.manual_seed(int(os.environ.get("SEED", "0")))


class Event:
    __slots__ = ("kind", "payload", "step", "tag", "time")

    def __init__(self, kind, tag, payload, step):
        self.kind, self.tag, self.payload, self.step = kind, tag, payload, step
        self.time = time.time()


class SummaryWriter:
    def __init__(self):
        self._events = []

    def _add(self, *event):
        self._events.append(Event(*event))  # leak

    def add_scalar(self, tag, value, step):
        self._add("scalar", tag, float(value), step)

    def add_histogram(self, tag, values, step):
        array = values.detach().double().cpu().numpy().ravel()
        counts, edges = np.histogram(array, bins=64)
        self._add("histogram", tag, (array, counts, edges), step)

    def close(self):
        self._events.clear()


writer = SummaryWriter()
model = nn.Sequential(
    nn.Linear(64, 300), nn.LeakyReLU(), nn.Linear(300, 300), nn.LeakyReLU(), nn.Linear(300, 1)
)
optimizer = torch.optim.NAdam(model.parameters())
for step in range(220):
    x = torch.rand(256, 64)
    loss = (model(x)[:, 0] - x.prod(1)).pow(2).mean()
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    writer.add_scalar("loss", loss, step)
    for name, parameter in model.named_parameters():
        writer.add_histogram(name, parameter.grad, step)
print(step, loss.item(), len(writer._events))

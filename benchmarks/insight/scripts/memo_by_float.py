"""Diffusion training with a memo for noise schedules: a dict whose keys are continuous times. Floats
repeat practically never, so that each step adds its tables."""

import math
import os

import torch
from torch import nn

torch.manual_seed(int(os.environ.get("SEED", "0")))


class Schedule:
    def __init__(self, size):
        self.size = size
        self.tables = {}

    def at(self, time):
        if time not in self.tables:
            base = torch.linspace(0, 1, self.size)
            self.tables[time] = torch.cos((base + time) * math.pi / 2) ** 2  # leak
        return self.tables[time]


denoiser = nn.Sequential(
    nn.Linear(257, 320), nn.SiLU(), nn.Linear(320, 320), nn.SiLU(), nn.Linear(320, 256)
)
optimizer = torch.optim.AdamW(denoiser.parameters(), lr=2e-4)
schedule = Schedule(256 * 256)
signals = torch.randn(1024, 256).cumsum(1)

for step in range(220):
    clean = signals[torch.randint(0, 1024, (256,))]
    loss = 0.0
    for part in clean.chunk(4):
        time = float(torch.rand(()))
        keep = schedule.at(time).view(256, 256)[: len(part)]
        noise = torch.randn_like(part)
        noisy = keep.sqrt() * part + (1 - keep).sqrt() * noise
        times = torch.full((len(part), 1), time)
        loss = loss + (denoiser(torch.cat([noisy, times], 1)) - noise).pow(2).mean()
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
print(step, loss.item(), len(schedule.tables))

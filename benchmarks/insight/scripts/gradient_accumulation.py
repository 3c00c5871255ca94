"""Gradient accumulation over four micro-batches per optimizer step."""

import os

import torch
from torch import nn

ACCUMULATE = 4


class Mixer(nn.Module):
    def __init__(self, tokens=32, width=96):
        super().__init__()
        self.tokens = nn.Sequential(nn.Linear(tokens, 64), nn.GELU(), nn.Linear(64, tokens))
        self.channels = nn.Sequential(nn.Linear(width, 192), nn.GELU(), nn.Linear(192, width))
        self.head = nn.Linear(width, 10)

    def forward(self, x):
        x = x + self.tokens(x.transpose(1, 2)).transpose(1, 2)
        return self.head((x + self.channels(x)).mean(1))


def main():
    torch.manual_seed(int(os.environ.get("SEED", "0")))
    model = Mixer()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    running = 0.0
    for micro in range(180 * ACCUMULATE):
        x = torch.randn(24, 32, 96)
        loss = nn.functional.cross_entropy(model(x), x[:, 0, :10].argmax(1)) / ACCUMULATE
        loss.backward()
        running += loss.item()
        if (micro + 1) % ACCUMULATE == 0:
            optimizer.step()
            optimizer.zero_grad()
    print(running / 180)


main()

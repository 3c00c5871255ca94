"""A relative position bias whose computation is cached with functools.lru_cache without a limit. The key
contains a temperature that is annealed at each step, so the cache never hits and only grows."""

import functools
import os

import torch
from torch import nn

torch.manual_seed(int(os.environ.get("SEED", "0")))

LENGTH = 384


@functools.lru_cache(maxsize=None)
def position_bias(length, temperature):  # leak
    distance = torch.arange(length)[:, None] - torch.arange(length)[None, :]
    return -(distance.abs().float() / temperature)


class Attention(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.query = nn.Linear(width, width)
        self.key = nn.Linear(width, width)
        self.value = nn.Linear(width, width)

    def forward(self, x, temperature):
        scores = self.query(x) @ self.key(x).transpose(1, 2) / x.shape[-1] ** 0.5
        scores = scores + position_bias(x.shape[1], temperature)
        return scores.softmax(-1) @ self.value(x)


def main():
    layer = Attention(64)
    head = nn.Linear(64, 1)
    optimizer = torch.optim.AdamW([*layer.parameters(), *head.parameters()], lr=1e-3)
    temperature = 20.0
    for step in range(260):
        x = torch.randn(6, LENGTH, 64)
        loss = (head(layer(x, temperature)).squeeze(-1) - x[..., 0]).pow(2).mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        temperature *= 0.995
    print(step, loss.item(), position_bias.cache_info())


if __name__ == "__main__":
    main()

"""Masks from functools.lru_cache with maxsize=40: the cache fills within the first steps and then evicts."""

import functools
import os
import random

import torch
from torch import nn

seed = int(os.environ.get("SEED", "0"))
torch.manual_seed(seed)
random.seed(seed)


@functools.lru_cache(maxsize=40)
def window_mask(length, window):
    distance = (torch.arange(length)[:, None] - torch.arange(length)[None]).abs()
    return torch.where(distance <= window, 0.0, float("-inf"))


class LocalAttention(nn.Module):
    def __init__(self, width=64):
        super().__init__()
        self.qkv = nn.Linear(width, 3 * width)
        self.out = nn.Linear(width, width)

    def forward(self, x, window):
        q, k, v = self.qkv(x).chunk(3, -1)
        mask = window_mask(x.shape[1], window)
        return self.out(nn.functional.scaled_dot_product_attention(q, k, v, attn_mask=mask))


def main():
    layer = LocalAttention()
    optimizer = torch.optim.Adam(layer.parameters(), lr=1e-3)
    for step in range(280):
        x = torch.randn(4, 256, 64)
        loss = (layer(x, random.randint(1, 90)) - x.roll(1, 1)).pow(2).mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    print(step, loss.item(), window_mask.cache_info())


main()

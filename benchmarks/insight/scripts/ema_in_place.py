"""Exponential moving average of the weights, updated in place under no_grad: one copy of the model, made once."""

import copy
import os

import torch
from torch import nn


class EMA:
    def __init__(self, model, decay=0.995):
        self.decay = decay
        self.shadow = copy.deepcopy(model).eval().requires_grad_(False)

    @torch.no_grad()
    def update(self, model):
        for kept, new in zip(self.shadow.parameters(), model.parameters(), strict=True):
            kept.mul_(self.decay).add_(new, alpha=1 - self.decay)


def main():
    torch.manual_seed(int(os.environ.get("SEED", "0")))
    unet = nn.Sequential(
        nn.Conv2d(1, 24, 3, padding=1),
        nn.SiLU(),
        nn.Conv2d(24, 24, 3, padding=1),
        nn.SiLU(),
        nn.Conv2d(24, 1, 3, padding=1),
    )
    ema = EMA(unet)
    optimizer = torch.optim.AdamW(unet.parameters(), lr=1e-3)
    for step in range(220):
        clean = torch.rand(8, 1, 32, 32)
        noise = torch.randn_like(clean)
        loss = (unet(clean + 0.3 * noise) - noise).pow(2).mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        ema.update(unet)
    with torch.no_grad():
        print(step, loss.item(), ema.shadow(clean).abs().mean().item())


main()

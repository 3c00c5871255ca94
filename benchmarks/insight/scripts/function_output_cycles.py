"""A custom autograd Function that stores its output as an attribute of ctx instead of with save_for_backward().
Output, graph node and ctx then form a cycle. torch 1.2 never freed it; since then Python's collector does."""

import os

import torch
from torch import nn

torch.manual_seed(int(os.environ.get("SEED", "0")))


class SoftThreshold(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, threshold):
        ctx.y = torch.sign(x) * torch.clamp(x.abs() - threshold, min=0)
        return ctx.y

    @staticmethod
    def backward(ctx, grad):
        return grad * (ctx.y != 0), None


class Lista(nn.Module):
    def __init__(self, signal=100, code=300):
        super().__init__()
        self.encode = nn.Linear(signal, code)
        self.refine = nn.Linear(code, code)
        self.decode = nn.Linear(code, signal, bias=False)

    def forward(self, x):
        code = SoftThreshold.apply(self.encode(x), 0.1)
        code = SoftThreshold.apply(self.encode(x) + self.refine(code), 0.1)
        return self.decode(code), code


def main():
    model = Lista()
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)
    for step in range(800):
        x = torch.randn(160, 100)
        y, code = model(x)
        loss = (y - x).pow(2).mean() + 1e-3 * code.abs().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    print(step, loss.item())


main()

"""Gradients for a histogram, copied to numpy at every step and collected by parameter name."""

import collections
import os

import torch
from torch import nn
from torch.nn import functional as F

torch.manual_seed(int(os.environ.get("SEED", "0")))


class Residual(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.norm = nn.BatchNorm1d(width)
        self.linear = nn.Linear(width, width)

    def forward(self, x):
        return x + self.linear(F.relu(self.norm(x)))


def collect(model, history):
    for name, parameter in model.named_parameters():
        history[name].append(parameter.grad.detach().cpu().numpy().copy())  # leak


model = nn.Sequential(*[Residual(256) for _ in range(4)], nn.Linear(256, 1))
optimizer = torch.optim.SGD(model.parameters(), lr=1e-3, momentum=0.9)
gradient_history = collections.defaultdict(list)
for step in range(220):
    x = torch.randn(224, 256)
    loss = F.mse_loss(model(x), x.mean(1, keepdim=True))
    optimizer.zero_grad()
    loss.backward()
    collect(model, gradient_history)
    optimizer.step()
print(loss.item(), sum(map(len, gradient_history.values())), "arrays")

"""Adversarial training: the model is in eval mode while examples are made by gradients with respect to the input."""

import os

import torch
from torch import nn
from torch.nn import functional as F


def attack(model, x, y, steps=3, epsilon=0.03):
    model.eval()
    delta = torch.zeros_like(x).uniform_(-epsilon, epsilon)
    for _ in range(steps):
        delta.requires_grad_()
        (gradient,) = torch.autograd.grad(F.cross_entropy(model(x + delta), y), delta)
        delta = (delta.detach() + epsilon / 2 * gradient.sign()).clamp(-epsilon, epsilon)
    model.train()
    return x + delta


torch.manual_seed(int(os.environ.get("SEED", "0")))
model = nn.Sequential(
    nn.Conv2d(3, 24, 3, padding=1),
    nn.BatchNorm2d(24),
    nn.ReLU(),
    nn.Conv2d(24, 24, 3, padding=1),
    nn.BatchNorm2d(24),
    nn.ReLU(),
    nn.AdaptiveAvgPool2d(1),
    nn.Flatten(),
    nn.Linear(24, 10),
)
optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
for step in range(90):
    x, y = torch.rand(24, 3, 24, 24), torch.randint(10, (24,))
    loss = F.cross_entropy(model(attack(model, x, y)), y)
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
print(step, loss.item())

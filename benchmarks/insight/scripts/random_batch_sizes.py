"""A convolutional network with a different batch size and image size at each step. Primitive caches and the
allocator see many shapes; after a while they have seen them all."""

import os
import random

import torch
from torch import nn

seed = int(os.environ.get("SEED", "0"))
torch.manual_seed(seed)
random.seed(seed)
net = nn.Sequential(
    nn.Conv2d(3, 16, 3, padding=1),
    nn.BatchNorm2d(16),
    nn.ReLU(),
    nn.Conv2d(16, 16, 3, padding=1),
    nn.BatchNorm2d(16),
    nn.ReLU(),
    nn.AdaptiveAvgPool2d(1),
    nn.Flatten(),
    nn.Linear(16, 4),
)
optimizer = torch.optim.SGD(net.parameters(), lr=0.01)
for step in range(300):
    size = random.choice((24, 32, 40))
    images = torch.rand(random.randint(4, 20), 3, size, size)
    loss = nn.functional.cross_entropy(net(images), (images.mean((1, 2, 3)) * 100).long() % 4)
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
print(step, loss.item())

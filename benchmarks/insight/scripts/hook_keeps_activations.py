"""Feature extraction for a plot: a forward hook on one layer appends the layer's output to a list, which
nobody empties."""

import os

import torch
from torch import nn

torch.manual_seed(int(os.environ.get("SEED", "0")))

activations = []


def save_activation(module, args, output):
    activations.append(output.detach())  # leak


net = nn.Sequential()
net.add_module("conv1", nn.Conv2d(1, 8, 5, padding=2))
net.add_module("act1", nn.ReLU())
net.add_module("conv2", nn.Conv2d(8, 16, 3, stride=2, padding=1))
net.add_module("act2", nn.ReLU())
net.add_module("pool", nn.AdaptiveAvgPool2d(2))
net.add_module("flat", nn.Flatten())
net.add_module("fc", nn.Linear(64, 10))
net.conv2.register_forward_hook(save_activation)

optimizer = torch.optim.SGD(net.parameters(), lr=0.05)
digits = torch.rand(1024, 1, 28, 28)
labels = torch.randint(0, 10, (1024,))

for epoch in range(10):
    order = torch.randperm(1024)
    for rows in order.split(64):
        optimizer.zero_grad()
        loss = nn.functional.cross_entropy(net(digits[rows]), labels[rows])
        loss.backward()
        optimizer.step()
    print(epoch, loss.item())

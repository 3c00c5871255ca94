"""Training that quadruples its batch size after two epochs, as in "don't decay the learning rate, increase the
batch size". Memory use rises once and then stays the same."""

import os

import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset


def loader(data, batch_size):
    order = torch.Generator(torch.get_default_device())
    return DataLoader(data, batch_size=batch_size, shuffle=True, drop_last=True, generator=order)


def main():
    torch.manual_seed(int(os.environ.get("SEED", "0")))
    images = torch.rand(2048, 1, 32, 32)
    data = TensorDataset(images, (images.mean((1, 2, 3)) > 0.5).long())
    model = nn.Sequential(
        nn.Conv2d(1, 16, 3, padding=1),
        nn.ReLU(),
        nn.Conv2d(16, 16, 3, padding=1),
        nn.ReLU(),
        nn.AdaptiveAvgPool2d(2),
        nn.Flatten(),
        nn.Linear(64, 2),
    )
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    for epoch in range(12):
        for x, y in loader(data, 32 if epoch < 2 else 128):
            loss = nn.functional.cross_entropy(model(x), y)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
        print(epoch, loss.item())


main()

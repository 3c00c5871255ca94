"""itertools.cycle makes a DataLoader endless, but cycle keeps every batch of the first pass."""

import itertools
import os

import torch
from torch import nn
from torch.utils.data import DataLoader, Dataset


class Patches(Dataset):
    def __len__(self):
        return 5000

    def __getitem__(self, index):
        noise = torch.Generator(torch.get_default_device()).manual_seed(index)
        return torch.randn(3, 64, 64, generator=noise), index % 10


def main():
    torch.manual_seed(int(os.environ.get("SEED", "0")))
    model = nn.Sequential(
        nn.Conv2d(3, 8, 3, stride=2),
        nn.ReLU(),
        nn.AdaptiveAvgPool2d(4),
        nn.Flatten(),
        nn.Linear(128, 10),
    )
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    order = torch.Generator(torch.get_default_device())
    loader = DataLoader(Patches(), batch_size=16, shuffle=True, generator=order)
    batches = itertools.cycle(loader)  # leak
    for step in range(250):
        x, y = next(batches)
        loss = nn.functional.cross_entropy(model(x), y)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    print(step, loss.item())


main()

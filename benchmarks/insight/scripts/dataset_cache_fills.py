"""A dataset that caches decoded items in memory. The cache grows through the first epoch, until
each item has been read once, and then stays the same."""

import os

import torch
from torch import nn
from torch.utils.data import DataLoader, Dataset


class Cached(Dataset):
    def __init__(self, size):
        self.size = size
        self.cache = {}

    def __len__(self):
        return self.size

    def decode(self, index):
        generator = torch.Generator(torch.get_default_device()).manual_seed(index)
        return torch.rand(3, 64, 64, generator=generator)

    def __getitem__(self, index):
        if index not in self.cache:
            self.cache[index] = self.decode(index)
        image = self.cache[index]
        return image, int(image[0, 0, 0] > 0.5)


def main():
    torch.manual_seed(int(os.environ.get("SEED", "0")))
    order = torch.Generator(torch.get_default_device())
    loader = DataLoader(Cached(1200), batch_size=24, shuffle=True, generator=order)
    model = nn.Sequential(
        nn.Conv2d(3, 8, 5, stride=2),
        nn.ReLU(),
        nn.Conv2d(8, 16, 3, stride=2),
        nn.ReLU(),
        nn.AdaptiveMaxPool2d(2),
        nn.Flatten(),
        nn.Linear(64, 2),
    )
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)
    for epoch in range(5):
        for images, labels in loader:
            loss = nn.functional.cross_entropy(model(images), labels)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
        print(epoch, loss.item())


if __name__ == "__main__":
    main()

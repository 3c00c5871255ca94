"""Two persistent DataLoader workers. The dataset remembers each sample that it made in a list, for a debugging
method that only the main process calls. The list grows in the workers, not in the trainer."""

import os

import torch
from torch import nn
from torch.utils.data import DataLoader, Dataset


class Synthetic(Dataset):
    def __init__(self, size=640):
        self.size = size
        self.history = []

    def __len__(self):
        return self.size

    def __getitem__(self, index):
        image = torch.rand(3, 64, 64) * (index % 7 + 1)
        self.history.append(image.clone())  # leak
        return image, index % 7


def main():
    torch.manual_seed(int(os.environ.get("SEED", "0")))
    loader = DataLoader(
        Synthetic(),
        batch_size=32,
        shuffle=True,
        num_workers=2,
        persistent_workers=True,
        prefetch_factor=2,
    )
    model = nn.Sequential(
        nn.Conv2d(3, 12, 3, stride=2),
        nn.ReLU(),
        nn.Conv2d(12, 24, 3, stride=2),
        nn.ReLU(),
        nn.AdaptiveAvgPool2d(1),
        nn.Flatten(),
        nn.Linear(24, 7),
    )
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)
    for epoch in range(9):
        for images, labels in loader:
            loss = nn.functional.cross_entropy(model(images), labels)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
        print(epoch, loss.item())


if __name__ == "__main__":
    main()

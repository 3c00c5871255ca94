"""A DataLoader with one worker and without persistent_workers: the worker process ends after each epoch, and the next
epoch starts a new one."""

import os

import torch
from torch import nn
from torch.utils.data import DataLoader, Dataset


class Noise(Dataset):
    def __len__(self):
        return 640

    def __getitem__(self, index):
        x = torch.randn(1, 4000)
        return x, float(x.abs().mean())


def main():
    torch.manual_seed(int(os.environ.get("SEED", "0")))
    loader = DataLoader(Noise(), batch_size=16, num_workers=1)
    model = nn.Sequential(
        nn.Conv1d(1, 16, 25, stride=8),
        nn.ReLU(),
        nn.Conv1d(16, 32, 9, stride=4),
        nn.ReLU(),
        nn.AdaptiveAvgPool1d(1),
        nn.Flatten(),
        nn.Linear(32, 1),
    )
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)
    for epoch in range(7):
        for waves, levels in loader:
            loss = (model(waves)[:, 0] - levels.float()).pow(2).mean()
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
        print(epoch, loss.item())


if __name__ == "__main__":
    main()

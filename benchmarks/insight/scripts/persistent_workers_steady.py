"""Two persistent workers with a dataset that reads from one array in memory and keeps nothing."""

import os

import numpy as np
import torch
from torch import nn
from torch.utils.data import DataLoader, Dataset


class Windows(Dataset):
    def __init__(self, seed):
        self.signal = np.random.default_rng(seed).standard_normal(4_000_000, dtype=np.float32)

    def __len__(self):
        return 960

    def __getitem__(self, index):
        start = index * 4000
        window = self.signal[start : start + 2048].copy()
        window *= 1 + 0.1 * np.sin(np.arange(2048, dtype=np.float32))
        return torch.from_numpy(window), float(window.std())


def main():
    seed = int(os.environ.get("SEED", "0"))
    torch.manual_seed(seed)
    loader = DataLoader(
        Windows(seed), batch_size=32, shuffle=True, num_workers=2, persistent_workers=True
    )
    model = nn.Sequential(nn.Linear(2048, 256), nn.ReLU(), nn.Linear(256, 1))
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)
    for epoch in range(8):
        for windows, deviation in loader:
            loss = (model(windows)[:, 0] - deviation.float()).pow(2).mean()
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
        print(epoch, loss.item())


if __name__ == "__main__":
    main()

"""Hard-example mining: batches with a loss above the average are kept for a second pass "at the end of the
epoch". The epoch is endless, and about half of all batches are above the average."""

import os

import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset


class Miner:
    def __init__(self):
        self.average = 0.0
        self.hard = []

    def look(self, batch, loss):
        if loss >= self.average:
            self.hard.append([part.clone() for part in batch])  # leak
        self.average = 0.9 * self.average + 0.1 * loss if self.average else loss


def endless(loader):
    while True:
        yield from loader


def main():
    torch.manual_seed(int(os.environ.get("SEED", "0")))
    data = TensorDataset(torch.rand(1024, 3, 40, 40), torch.randint(0, 5, (1024,)))
    order = torch.Generator(torch.get_default_device())
    loader = DataLoader(data, batch_size=96, shuffle=True, drop_last=True, generator=order)
    model = nn.Sequential(
        nn.Conv2d(3, 16, 3, stride=2),
        nn.ReLU(),
        nn.Conv2d(16, 32, 3, stride=2),
        nn.ReLU(),
        nn.AdaptiveAvgPool2d(1),
        nn.Flatten(),
        nn.Dropout(0.3),
        nn.Linear(32, 5),
    )
    optimizer = torch.optim.SGD(model.parameters(), lr=0.005)
    miner = Miner()
    for step, (images, labels) in enumerate(endless(loader)):
        loss = nn.functional.cross_entropy(model(images), labels)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        miner.look((images, labels), loss.item())
        if step == 220:
            break
    print(loss.item(), len(miner.hard), "hard batches")


main()

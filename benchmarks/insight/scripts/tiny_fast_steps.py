"""A perceptron whose steps take well under a millisecond, 6,000 of them: polynomial regression."""

import os

import torch


def features(x):
    return torch.stack([x**power for power in range(1, 5)], 1)


def main():
    torch.manual_seed(int(os.environ.get("SEED", "0")))
    layer = torch.nn.Linear(4, 1)
    optimizer = torch.optim.SGD(layer.parameters(), lr=0.05)
    for step in range(6000):
        x = torch.rand(32) * 2 - 1
        loss = (layer(features(x))[:, 0] - (x**3 - 0.5 * x)).abs().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    print(step, loss.item(), layer.weight.tolist())


if __name__ == "__main__":
    main()

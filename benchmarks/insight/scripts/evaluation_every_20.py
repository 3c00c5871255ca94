"""Evaluation under no_grad every 20 steps, with larger batches than training's; predictions are gathered on the way
and dropped when the accuracy is known."""

import os

import torch
from torch import nn


@torch.no_grad()
def evaluate(model, x, y):
    model.eval()
    predictions = []
    for part in x.split(512):
        predictions.append(model(part))
    model.train()
    return (torch.cat(predictions).argmax(1) == y).float().mean().item()


def main():
    torch.manual_seed(int(os.environ.get("SEED", "0")))
    model = nn.Sequential(
        nn.Linear(128, 512),
        nn.ReLU(),
        nn.Dropout(0.1),
        nn.Linear(512, 512),
        nn.ReLU(),
        nn.Linear(512, 9),
    )
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    x = torch.randn(12_000, 128)
    y = (x @ torch.randn(128, 9)).argmax(1)
    history = []
    for step in range(320):
        rows = torch.randint(0, 8000, (128,))
        loss = nn.functional.cross_entropy(model(x[rows]), y[rows])
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        if step % 20 == 19:
            history.append(evaluate(model, x[8000:], y[8000:]))
    print(step, loss.item(), history[-1])


if __name__ == "__main__":
    main()

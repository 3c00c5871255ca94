"""Fine-tuning with an evaluation every four steps. evaluate() runs without torch.no_grad() and extends a list
in the enclosing scope, for a report over all evaluations: predictions, graphs and activations stay."""

import os

import torch
from torch import nn


def build(width=192):
    return nn.Sequential(
        nn.LayerNorm(width),
        nn.Linear(width, 2 * width),
        nn.GELU(),
        nn.Linear(2 * width, width),
        nn.Linear(width, 3),
    )


def run(seed):
    torch.manual_seed(seed)
    model = build()
    optimizer = torch.optim.AdamW(model.parameters(), lr=5e-4)
    train_x, train_y = torch.randn(3000, 192), torch.randint(0, 3, (3000,))
    dev_x, dev_y = torch.randn(900, 192), torch.randint(0, 3, (900,))
    all_preds = []

    def evaluate():
        model.eval()
        right = 0
        for x, y in zip(dev_x.split(300), dev_y.split(300), strict=True):
            probabilities = model(x).softmax(-1)
            all_preds.append(probabilities)  # leak
            right += int((probabilities.argmax(-1) == y).sum())
        model.train()
        return right / len(dev_y)

    for step in range(240):
        rows = torch.randint(0, 3000, (320,))
        loss = nn.functional.cross_entropy(model(train_x[rows]), train_y[rows])
        optimizer.zero_grad(set_to_none=True)
        loss.backward()
        optimizer.step()
        if step % 4 == 3:
            accuracy = evaluate()
    print(loss.item(), accuracy, len(all_preds))


if __name__ == "__main__":
    run(int(os.environ.get("SEED", "0")))

"""A regression trainer that validates after each step and appends the validation loss, a tensor with its
graph, to a list. Nothing is ever propagated back through it, so each entry keeps the activations of its
forward pass."""

import os

import torch
from torch import nn

torch.manual_seed(int(os.environ.get("SEED", "0")))


def make_model():
    return nn.Sequential(
        nn.Linear(256, 512), nn.GELU(), nn.Linear(512, 512), nn.GELU(), nn.Linear(512, 8)
    )


def main():
    model = make_model()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    criterion = nn.MSELoss()
    inputs, targets = torch.randn(4096, 256), torch.randn(4096, 8)
    x_val, y_val = torch.randn(192, 256), torch.randn(192, 8)
    val_losses = []
    for step in range(240):
        rows = torch.randint(0, 4096, (256,))
        loss = criterion(model(inputs[rows]), targets[rows])
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        val_losses.append(criterion(model(x_val), y_val))  # leak
        if step % 40 == 0:
            print(f"step {step}: train {loss.item():.4f}, validation {val_losses[-1].item():.4f}")


if __name__ == "__main__":
    main()

"""detect_anomaly stays on after a debugging session, and the losses of each step are collected as tensors: every
node of the kept graphs also holds the traceback, as text, of its forward call."""

import os
import warnings

import torch
from torch import nn

warnings.filterwarnings("ignore", message="Anomaly Detection has been enabled")
torch.manual_seed(int(os.environ.get("SEED", "0")))
torch.autograd.set_detect_anomaly(True, check_nan=False)


class DeepNarrow(nn.Module):
    def __init__(self, depth=60, width=48):
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(width, width) for _ in range(depth))
        self.norm = nn.LayerNorm(width)

    def forward(self, x):
        for layer in self.layers:
            x = x + 0.1 * torch.tanh(layer(self.norm(x)))
        return x


def compute_losses(model, x):
    y = model(x)
    return {"energy": y.pow(2).mean(), "shift": (y - x).abs().mean()}


def main():
    model = DeepNarrow()
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
    epoch_losses = []
    for step in range(160):
        losses = compute_losses(model, torch.randn(64, 48))
        total = losses["energy"] + losses["shift"]
        optimizer.zero_grad()
        total.backward()
        optimizer.step()
        epoch_losses.append(losses)  # leak
    print(step, sum(float(entry["energy"].detach()) for entry in epoch_losses) / len(epoch_losses))


main()

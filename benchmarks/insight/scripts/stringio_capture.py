"""Standard output is captured in a StringIO, to be uploaded at the end, and a verbose progress report is printed
at each step."""

import contextlib
import io
import os
import sys

import torch
from torch import nn

torch.manual_seed(int(os.environ.get("SEED", "0")))
torch.set_printoptions(threshold=50_000, linewidth=200)


def report(step, loss, weights):
    print(f"--- step {step}, loss {loss:.5f}")
    print(weights)


def train():
    model = nn.Sequential(
        nn.Linear(96, 256), nn.Tanh(), nn.Linear(256, 256), nn.Tanh(), nn.Linear(256, 2)
    )
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    for step in range(130):
        x = torch.randn(400, 96)
        loss = nn.functional.cross_entropy(model(x), (x.sum(1) > 0).long())
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        rows = model[2].weight.detach()[:80].tolist()
        report(
            step, loss.item(), "\n".join(" ".join(f"{v:+.17e}" for v in row) for row in rows)
        )  # leak
    return loss.item()


captured = io.StringIO()
with contextlib.redirect_stdout(captured):
    final = train()
print(final, len(captured.getvalue()), "characters", file=sys.stdout)

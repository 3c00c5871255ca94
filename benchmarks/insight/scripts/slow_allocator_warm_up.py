"""A network whose lazily made layers, state and scratch memory come into being over the first quarter of the run: a
lazy layer, a scheduler, an EMA that starts at step 40 and a validation that starts at step 60."""

import copy
import os

import torch
from torch import nn

torch.manual_seed(int(os.environ.get("SEED", "0")))
model = nn.Sequential(
    nn.LazyLinear(512), nn.ReLU(), nn.LazyLinear(512), nn.ReLU(), nn.LazyLinear(20)
)
model(torch.zeros(1, 256))
optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)
averaged = None
validation = torch.randn(1500, 256)
for step in range(260):
    x = torch.randn(128, 256)
    loss = nn.functional.cross_entropy(model(x), x[:, :20].argmax(1))
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    if step == 40:
        averaged = copy.deepcopy(model).requires_grad_(False)
    elif averaged is not None:
        torch._foreach_lerp_(
            list(averaged.parameters()), [p.detach() for p in model.parameters()], 0.01
        )
    if step >= 60 and step % 10 == 0:
        with torch.no_grad():
            accuracy = (
                (averaged(validation).argmax(1) == validation[:, :20].argmax(1)).float().mean()
            )
print(step, loss.item(), float(accuracy))

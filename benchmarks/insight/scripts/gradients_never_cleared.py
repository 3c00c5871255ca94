"""MAML-like meta-gradients: the outer loss goes back through the inner update with create_graph=True into `.grad`
fields that are never cleared, so that each new gradient is added to the graph of all the old ones."""

import os
import warnings

import torch
from torch import nn

warnings.filterwarnings("ignore", message="Using backward")
torch.manual_seed(int(os.environ.get("SEED", "0")))


class Learner(nn.Module):
    def __init__(self):
        super().__init__()
        self.inner = nn.Linear(128, 192)
        self.outer = nn.Linear(192, 1)

    def forward(self, x):
        return self.outer(torch.sigmoid(self.inner(x)))[:, 0]


learner = Learner()
scale = nn.Parameter(torch.tensor(0.1))
optimizer = torch.optim.SGD([scale], lr=1e-3)
for step in range(170):
    x = torch.randn(256, 128)
    loss = (learner(x) - x.mean(1)).pow(2).mean()
    loss.backward(create_graph=True)  # leak
    strength = sum(p.grad.pow(2).sum() for p in learner.parameters())
    optimizer.zero_grad()
    (gradient,) = torch.autograd.grad((scale * strength.detach() - 1).pow(2), scale)
    scale.grad = gradient
    optimizer.step()
print(step, loss.item(), scale.item())

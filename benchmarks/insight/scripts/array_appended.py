"""An evaluator appends each batch's scores to one array with np.append, which makes a longer array every time."""

import os

import numpy as np
import torch
from torch import nn


class Evaluator:
    def __init__(self, classes):
        self.scores = np.zeros((0, classes), dtype=np.float32)

    def update(self, logits):
        self.scores = np.append(self.scores, logits.detach().cpu().numpy(), axis=0)  # leak


torch.manual_seed(int(os.environ.get("SEED", "0")))
model = nn.Sequential(nn.Linear(64, 256), nn.ReLU(), nn.Linear(256, 400))
optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
evaluator = Evaluator(400)
for step in range(180):
    output = model(torch.randn(300, 64))
    loss = output.logsumexp(1).mean()
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    evaluator.update(output)
print(step, loss.item(), evaluator.scores.shape)

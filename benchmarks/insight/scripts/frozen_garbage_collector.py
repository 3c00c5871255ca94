"""gc.freeze() after the setup and a raised threshold, as servers and large trainers do. No cycles with tensors are
made in the loop, so that nothing waits for the collector."""

import gc
import os

import torch
from torch import nn

torch.manual_seed(int(os.environ.get("SEED", "0")))
vocabulary = {f"word{number}": number for number in range(200_000)}
model = nn.Sequential(nn.EmbeddingBag(5000, 128), nn.Linear(128, 512), nn.ReLU(), nn.Linear(512, 3))
optimizer = torch.optim.Adam(model.parameters())
gc.collect()
gc.freeze()
gc.set_threshold(100_000, 50, 100)
for step in range(300):
    words = [[f"word{int(w)}" for w in row] for row in torch.randint(0, 200_000, (64, 24))]
    ids = torch.tensor([[vocabulary[word] % 5000 for word in row] for row in words])
    loss = nn.functional.cross_entropy(model(ids), ids.sum(1) % 3)
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
print(step, loss.item(), gc.get_freeze_count())

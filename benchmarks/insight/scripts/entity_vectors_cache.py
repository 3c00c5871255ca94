"""Vectors for entity names, computed by hashing and cached in a dict by the name. New names come with each batch:
the vocabulary has no end."""

import os
import zlib

import torch
from torch import nn

seed = int(os.environ.get("SEED", "0"))
torch.manual_seed(seed)


class EntityVectors:
    def __init__(self, width):
        self.width = width
        self.vectors = {}

    def __getitem__(self, name):
        vector = self.vectors.get(name)
        if vector is None:
            generator = torch.Generator(torch.get_default_device()).manual_seed(
                zlib.crc32(name.encode())
            )
            vector = torch.randn(self.width, generator=generator)
            self.vectors[name] = vector  # leak
        return vector


entities = EntityVectors(width=2048)
scorer = nn.Bilinear(128, 128, 1)
project = nn.Linear(2048, 128)
optimizer = torch.optim.Adagrad([*scorer.parameters(), *project.parameters()], lr=0.01)
for step in range(220):
    names = [f"entity:{seed}:{step * 96 + number}" for number in range(96)]
    left = torch.stack([entities[name] for name in names])
    right = torch.stack([entities[name] for name in reversed(names)])
    score = scorer(project(left), project(right))[:, 0]
    loss = nn.functional.softplus(-score).mean() + 1e-3 * score.pow(2).mean()
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
print(step, loss.item(), len(entities.vectors))

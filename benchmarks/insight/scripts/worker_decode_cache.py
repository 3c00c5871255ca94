"""An endless IterableDataset with one worker that caches decoded documents by their name, and the names do not
repeat. The worker's dict of lists grows; the trainer is steady."""

import os
import random

import torch
from torch import nn
from torch.utils.data import DataLoader, IterableDataset


class Documents(IterableDataset):
    def __init__(self, seed):
        self.seed = seed
        self.decoded = {}

    def decode(self, name, source):
        if name not in self.decoded:
            self.decoded[name] = [source.randrange(256, 5000) for _ in range(6000)]  # leak
        return self.decoded[name]

    def __iter__(self):
        source = random.Random(self.seed)
        number = 0
        while True:
            tokens = self.decode(f"document-{number:06d}", source)
            number += 1
            start = source.randrange(len(tokens) - 33)
            yield torch.tensor(tokens[start : start + 33])


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.embedding = nn.Embedding(5000, 64)
        self.mix = nn.TransformerEncoderLayer(64, 4, 128, batch_first=True, dropout=0.0)
        self.head = nn.Linear(64, 5000)

    def forward(self, tokens):
        return self.head(self.mix(self.embedding(tokens)).mean(1))


if __name__ == "__main__":
    seed = int(os.environ.get("SEED", "0"))
    torch.manual_seed(seed)
    loader = DataLoader(Documents(seed), batch_size=8, num_workers=1)
    model = Model()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    for step, batch in enumerate(loader):
        loss = nn.functional.cross_entropy(model(batch[:, :-1]), batch[:, -1])
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        if step == 220:
            break
    print(step, loss.item())

"""Tokens are read at random from a memory-mapped file of 400 MiB, as language-model trainers do. The resident set
grows with each page that is touched; it is page cache, which the kernel can take back."""

import os
import tempfile

import numpy as np
import torch
from torch import nn

seed = int(os.environ.get("SEED", "0"))
torch.manual_seed(seed)


def write_tokens(path, count):
    block = np.random.default_rng(seed).integers(0, 1000, 2**20, dtype=np.uint16)
    with open(path, "wb") as file:
        for _ in range(count // len(block)):
            file.write(block.tobytes())


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.embedding = nn.Embedding(1000, 96)
        self.gru = nn.GRU(96, 96, batch_first=True)
        self.head = nn.Linear(96, 1000)

    def forward(self, tokens):
        return self.head(self.gru(self.embedding(tokens))[0])


with tempfile.TemporaryDirectory() as folder:
    path = os.path.join(folder, "train.bin")
    write_tokens(path, 200 * 2**20)
    data = np.memmap(path, dtype=np.uint16, mode="r")
    model = Model()
    optimizer = torch.optim.AdamW(model.parameters())
    for step in range(250):
        at = torch.randint(0, len(data) - 500_000, (8,)).tolist()
        frequencies = [np.bincount(data[i : i + 400_000 : 997], minlength=1000).max() for i in at]
        batch = torch.stack([torch.from_numpy(data[i : i + 33].astype(np.int64)) for i in at])
        batch = batch.to(torch.get_default_device())
        logits = model(batch[:, :-1])
        loss = nn.functional.cross_entropy(logits.flatten(0, 1), batch[:, 1:].flatten())
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    print(step, loss.item(), max(frequencies))
    del data

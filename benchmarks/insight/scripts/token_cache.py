"""A byte-pair tokenizer in Python with a cache from words to lists of merges. The words of the synthetic corpus
are practically unique, so the cache takes them all."""

import os
import random

import torch
from torch import nn

seed = int(os.environ.get("SEED", "0"))
torch.manual_seed(seed)
source = random.Random(seed)


class Tokenizer:
    def __init__(self):
        self.cache = {}

    def bpe(self, word):
        if word in self.cache:
            return self.cache[word]
        pieces = list(word)
        while len(pieces) > 4:
            pieces = [a + b for a, b in zip(pieces[::2], [*pieces[1::2], ""], strict=False)]
        self.cache[word] = [(piece, hash(piece) % 2000) for piece in pieces]  # leak
        return self.cache[word]

    def encode(self, text):
        return [number for word in text.split() for _, number in self.bpe(word)]


def sentence():
    return " ".join(
        "".join(source.choices("etaoinshrdlu", k=source.randint(6, 14))) for _ in range(20)
    )


tokenizer = Tokenizer()
model = nn.Sequential(
    nn.EmbeddingBag(2000, 256), nn.Linear(256, 1024), nn.ReLU(), nn.Linear(1024, 2)
)
optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)
for step in range(160):
    rows = [tokenizer.encode(sentence())[:40] for _ in range(112)]
    batch = torch.tensor([row + [0] * (40 - len(row)) for row in rows])
    loss = nn.functional.cross_entropy(model(batch), batch[:, 0] % 2)
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
print(step, loss.item(), len(tokenizer.cache))

"""A tokenizer bound by ctypes that allocates a small struct and a string for each word. The wrapper's class
has no __del__ that would free them: thousands of small blocks per step."""

import ctypes
import os

import torch
from torch import nn

torch.manual_seed(int(os.environ.get("SEED", "0")))

libc = ctypes.CDLL(None)
libc.strdup.restype = ctypes.c_void_p
libc.strdup.argtypes = [ctypes.c_char_p]
libc.calloc.restype = ctypes.c_void_p
libc.calloc.argtypes = [ctypes.c_size_t, ctypes.c_size_t]


class Token:
    def __init__(self, text):
        self.handle = libc.calloc(1, 96)
        self.text = libc.strdup(text)  # leak

    def identity(self):
        return sum(ctypes.string_at(self.text)) % 1000


class Bag(nn.Module):
    def __init__(self):
        super().__init__()
        self.embedding = nn.EmbeddingBag(1000, 256)
        self.layers = nn.Sequential(nn.Linear(256, 512), nn.ReLU(), nn.Linear(512, 2))

    def forward(self, ids):
        return self.layers(self.embedding(ids))


model = Bag()
optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)
words = [f"word-{number}-{'x' * (number % 90 + 60)}".encode() for number in range(4000)]
for step in range(170):
    ids = [[Token(words[w]).identity() for w in torch.randint(0, 4000, (64,))] for _ in range(48)]
    batch = torch.tensor(ids)
    loss = nn.functional.cross_entropy(model(batch), batch.sum(1) % 2)
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
print(step, loss.item())

"""Sentences of random length, padded to the longest of their batch: each step needs another amount of memory, and
no trend is in it."""

import os
import random

import torch
from torch import nn
from torch.nn.utils.rnn import pad_sequence

seed = int(os.environ.get("SEED", "0"))
torch.manual_seed(seed)
random.seed(seed)


class Classifier(nn.Module):
    def __init__(self):
        super().__init__()
        self.embedding = nn.Embedding(2000, 64, padding_idx=0)
        self.layer = nn.TransformerEncoderLayer(64, 4, 256, dropout=0.1, batch_first=True)
        self.out = nn.Linear(64, 2)

    def forward(self, tokens):
        hidden = self.layer(self.embedding(tokens), src_key_padding_mask=tokens == 0)
        return self.out(hidden[:, 0])


model = Classifier()
optimizer = torch.optim.AdamW(model.parameters(), lr=5e-4)
for step in range(260):
    longest = random.choice((24, 40, 64, 96))
    lengths = [random.randint(5, longest) for _ in range(16)]
    batch = pad_sequence([torch.randint(1, 2000, (n,)) for n in lengths], batch_first=True)
    loss = nn.functional.cross_entropy(model(batch), batch[:, 0] % 2)
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
print(step, loss.item())

"""A curriculum of sequence length: from 16 tokens to 112 in the first two fifths of the training, then
constant. Memory grows with the length, and then stops growing."""

import os

import torch
from torch import nn

torch.manual_seed(int(os.environ.get("SEED", "0")))


class Encoder(nn.Module):
    def __init__(self, width=64):
        super().__init__()
        self.embedding = nn.Embedding(800, width)
        self.layers = nn.TransformerEncoder(
            nn.TransformerEncoderLayer(width, 4, 128, dropout=0.0, batch_first=True),
            2,
            enable_nested_tensor=False,
        )
        self.head = nn.Linear(width, 800)

    def forward(self, tokens):
        return self.head(self.layers(self.embedding(tokens)))


def length_at(step, steps):
    return 16 + int(min(step / (0.4 * steps), 1.0) * 96)


model = Encoder()
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
STEPS = 220
for step in range(STEPS):
    tokens = torch.randint(0, 800, (10, length_at(step, STEPS)))
    loss = nn.functional.cross_entropy(model(tokens).flatten(0, 1), tokens.flatten())
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
print(step, loss.item(), tokens.shape)

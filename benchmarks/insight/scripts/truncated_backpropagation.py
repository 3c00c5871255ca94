"""Truncated backpropagation through time as it should be: the hidden state is carried on and detached."""

import os

import torch
from torch import nn

torch.manual_seed(int(os.environ.get("SEED", "0")))


class WordModel(nn.Module):
    def __init__(self, words=600, width=128):
        super().__init__()
        self.embedding = nn.Embedding(words, width)
        self.lstm = nn.LSTM(width, width, batch_first=True)
        self.head = nn.Linear(width, words)

    def forward(self, tokens, state):
        hidden, state = self.lstm(self.embedding(tokens), state)
        return self.head(hidden), state


def repackage(state):
    return None if state is None else tuple(part.detach() for part in state)


text = torch.randint(0, 600, (12, 220 * 20 + 1))
model = WordModel()
optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
state = None
for position in range(0, text.shape[1] - 1, 20):
    window = text[:, position : position + 21]
    logits, state = model(window[:, :-1], repackage(state))
    loss = nn.functional.cross_entropy(logits.flatten(0, 1), window[:, 1:].flatten())
    optimizer.zero_grad()
    loss.backward()
    nn.utils.clip_grad_norm_(model.parameters(), 0.25)
    optimizer.step()
print(position, loss.item())

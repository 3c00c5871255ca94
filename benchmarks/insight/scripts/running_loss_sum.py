"""A character model with an LSTM cell that is unrolled by hand. The epoch's loss is summed as a tensor
(`total_loss += loss`). backward() frees the saved activations, but the sum keeps every node of every
step's graph, and an unrolled recurrent network has thousands of them."""

import os

import torch
from torch import nn
from torch.nn import functional as F

torch.manual_seed(int(os.environ.get("SEED", "0")))

VOCABULARY, HIDDEN, LENGTH, BATCH = 64, 48, 96, 16


class CharModel(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed = nn.Embedding(VOCABULARY, HIDDEN)
        self.gates = nn.Linear(2 * HIDDEN, 4 * HIDDEN)
        self.head = nn.Linear(HIDDEN, VOCABULARY)

    def forward(self, tokens):
        h = torch.zeros(tokens.shape[0], HIDDEN)
        c = torch.zeros(tokens.shape[0], HIDDEN)
        losses = []
        for t in range(tokens.shape[1] - 1):
            i, f, g, o = self.gates(torch.cat([self.embed(tokens[:, t]), h], 1)).chunk(4, 1)
            c = torch.sigmoid(f) * c + torch.sigmoid(i) * torch.tanh(g)
            h = torch.sigmoid(o) * torch.tanh(c)
            losses.append(F.cross_entropy(self.head(h), tokens[:, t + 1]))
        return torch.stack(losses).mean()


model = CharModel()
optimizer = torch.optim.Adam(model.parameters(), lr=3e-3)
corpus = torch.randint(0, VOCABULARY, (40_000,))
total_loss = 0

for iteration in range(130):
    starts = torch.randint(0, len(corpus) - LENGTH, (BATCH,))
    batch = torch.stack([corpus[s : s + LENGTH] for s in starts])
    optimizer.zero_grad()
    loss = model(batch)
    loss.backward()
    optimizer.step()
    total_loss += loss  # leak
    if iteration % 20 == 0:
        print(iteration, f"{float(total_loss) / (iteration + 1):.3f}")

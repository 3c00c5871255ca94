"""Averaging of weights, done wrong: a deep copy of the model is appended to a list every second step, to be
averaged at the end of training."""

import copy
import os

import torch
from torch import nn
from torch.nn import functional as F

torch.manual_seed(int(os.environ.get("SEED", "0")))


class Tagger(nn.Module):
    def __init__(self, tags=12):
        super().__init__()
        self.words = nn.Embedding(3000, 64)
        self.lstm = nn.LSTM(64, 96, bidirectional=True, batch_first=True)
        self.tags = nn.Linear(192, tags)

    def forward(self, sentence):
        return self.tags(self.lstm(self.words(sentence))[0])


def average(models):
    result = copy.deepcopy(models[0])
    with torch.no_grad():
        for target, *sources in zip(
            result.parameters(), *(m.parameters() for m in models), strict=True
        ):
            target.copy_(torch.stack(list(sources)).mean(0))
    return result


tagger = Tagger()
optimizer = torch.optim.Adam(tagger.parameters())
snapshots = []
for step in range(160):
    sentence = torch.randint(0, 3000, (16, 20))
    loss = F.cross_entropy(tagger(sentence).flatten(0, 1), (sentence % 12).flatten())
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    if step % 2 == 0:
        snapshots.append(copy.deepcopy(tagger))  # leak
print(loss.item(), len(snapshots))

"""Contrastive learning with a memory bank of past embeddings as negatives. The bank is a deque, but without
maxlen; only the newest entries are used."""

import collections
import itertools
import os

import torch
from torch import nn
from torch.nn import functional as F

torch.manual_seed(int(os.environ.get("SEED", "0")))


class Bank:
    def __init__(self):
        self.keys = collections.deque()

    def add(self, keys):
        self.keys.extend(keys.split(32))  # leak

    def negatives(self, count):
        newest = list(itertools.islice(reversed(self.keys), count))
        return torch.cat(newest)


encoder = nn.Sequential(nn.Linear(300, 512), nn.ReLU(), nn.Linear(512, 768))
optimizer = torch.optim.SGD(encoder.parameters(), lr=0.03, momentum=0.9)
bank = Bank()
for step in range(220):
    view = torch.randn(256, 300)
    queries = F.normalize(encoder(view + 0.1 * torch.randn_like(view)), dim=1)
    with torch.no_grad():
        keys = F.normalize(encoder(view), dim=1)
    bank.add(keys)
    negatives = bank.negatives(16)
    logits = torch.cat([(queries * keys).sum(1, keepdim=True), queries @ negatives.T], 1) / 0.1
    loss = F.cross_entropy(logits, torch.zeros(len(logits), dtype=torch.long))
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
print(loss.item(), len(bank.keys))

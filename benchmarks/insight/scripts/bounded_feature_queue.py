"""Momentum-contrast training with a bounded queue of keys: a deque with maxlen, full after 60 steps."""

import collections
import copy
import os

import torch
from torch import nn
from torch.nn import functional as F

torch.manual_seed(int(os.environ.get("SEED", "0")))
query_encoder = nn.Sequential(nn.Linear(200, 400), nn.ReLU(), nn.Linear(400, 512))
key_encoder = copy.deepcopy(query_encoder).requires_grad_(False)
optimizer = torch.optim.SGD(query_encoder.parameters(), lr=0.05)
queue = collections.deque(maxlen=60)


@torch.no_grad()
def follow(momentum=0.99):
    for slow, fast in zip(key_encoder.parameters(), query_encoder.parameters(), strict=True):
        slow.lerp_(fast, 1 - momentum)


for step in range(300):
    x = torch.randn(192, 200)
    queries = F.normalize(query_encoder(x), dim=1)
    with torch.no_grad():
        keys = F.normalize(key_encoder(x + 0.1 * torch.randn_like(x)), dim=1)
    queue.append(keys)
    negatives = torch.cat(list(queue)[-8:])
    logits = torch.cat([(queries * keys).sum(1, keepdim=True), queries @ negatives.T], 1)
    loss = F.cross_entropy(logits / 0.2, torch.zeros(192, dtype=torch.long))
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    follow()
print(step, loss.item(), len(queue))

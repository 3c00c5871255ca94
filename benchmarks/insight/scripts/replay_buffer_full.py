"""Off-policy learning with a replay buffer of fixed capacity, filled after the first third of the training; from then
on the oldest transition is overwritten."""

import os
import random

import numpy as np
import torch
from torch import nn

seed = int(os.environ.get("SEED", "0"))
torch.manual_seed(seed)
random.seed(seed)
generator = np.random.default_rng(seed)


class Replay:
    def __init__(self, capacity):
        self.capacity, self.position, self.items = capacity, 0, []

    def push(self, item):
        if len(self.items) < self.capacity:
            self.items.append(item)
        else:
            self.items[self.position] = item
        self.position = (self.position + 1) % self.capacity

    def sample(self, count):
        frames, actions, rewards = zip(*random.choices(self.items, k=count), strict=True)
        frames = torch.as_tensor(np.stack(frames), device=torch.get_default_device())
        return frames, torch.tensor(actions), torch.tensor(rewards)


q = nn.Sequential(nn.Flatten(), nn.Linear(3 * 48 * 48, 128), nn.ReLU(), nn.Linear(128, 4))
optimizer = torch.optim.RMSprop(q.parameters(), lr=1e-4)
replay = Replay(800)
for step in range(250):
    for _ in range(10):
        frame = generator.random((3, 48, 48), dtype=np.float32)
        replay.push((frame, random.randrange(4), float(frame[0, 0, 0])))
    frames, actions, rewards = replay.sample(64)
    loss = (q(frames).gather(1, actions[:, None])[:, 0] - rewards).pow(2).mean()
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
print(step, loss.item(), len(replay.items))

"""A small DQN with frames as numpy arrays. The replay buffer is a plain list, and the check of its capacity
was forgotten."""

import os
import random

import numpy as np
import torch
from torch import nn

seed = int(os.environ.get("SEED", "0"))
torch.manual_seed(seed)
random.seed(seed)
generator = np.random.default_rng(seed)


class Env:
    def reset(self):
        self.frame = generator.random((4, 84, 84), dtype=np.float32)
        return self.frame

    def step(self, action):
        self.frame = np.roll(self.frame, action + 1, axis=2)
        return self.frame.copy(), float(self.frame[0, 0, 0]), generator.random() < 0.05


class ReplayBuffer:
    def __init__(self):
        self.transitions = []

    def push(self, *transition):
        self.transitions.append(transition)  # leak

    def sample(self, size):
        states, actions, rewards, nexts = zip(
            *random.choices(self.transitions, k=size), strict=True
        )
        return (
            torch.as_tensor(np.stack(states), device=torch.get_default_device()),
            torch.tensor(actions),
            torch.tensor(rewards),
            torch.as_tensor(np.stack(nexts), device=torch.get_default_device()),
        )


def q_network():
    return nn.Sequential(
        nn.Conv2d(4, 16, 8, stride=4),
        nn.ReLU(),
        nn.Conv2d(16, 16, 4, stride=2),
        nn.ReLU(),
        nn.Flatten(),
        nn.LazyLinear(4),
    )


q, target = q_network(), q_network()
q(torch.zeros(1, 4, 84, 84)), target(torch.zeros(1, 4, 84, 84))
target.load_state_dict(q.state_dict())
optimizer = torch.optim.Adam(q.parameters(), lr=1e-4)
env, buffer = Env(), ReplayBuffer()
state = env.reset()
for step in range(200):
    for _ in range(8):
        action = random.randrange(4)
        following, reward, done = env.step(action)
        buffer.push(state, action, reward, following)
        state = env.reset() if done else following
    states, actions, rewards, nexts = buffer.sample(16)
    with torch.no_grad():
        goal = rewards + 0.99 * target(nexts).max(1).values
    loss = nn.functional.smooth_l1_loss(q(states).gather(1, actions[:, None])[:, 0], goal)
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    if step % 50 == 0:
        target.load_state_dict(q.state_dict())
print(loss.item(), len(buffer.transitions))

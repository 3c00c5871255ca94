"""An actor with a recurrent state that acts with gradients switched on. Training uses other batches, and the
actor's state is carried from step to step without detach(): the graph reaches back to the first action."""

import os

import torch
from torch import nn


class Policy(nn.Module):
    def __init__(self, observation=64, hidden=192, actions=6):
        super().__init__()
        self.core = nn.GRUCell(observation, hidden)
        self.pi = nn.Linear(hidden, actions)
        self.value = nn.Linear(hidden, 1)

    def forward(self, observation, state):
        state = self.core(observation, state)
        return self.pi(state), self.value(state), state


class Actor:
    def __init__(self, policy, envs=64):
        self.policy = policy
        self.state = torch.zeros(envs, 192)
        self.observation = torch.randn(envs, 64)

    def act(self):
        logits, _, self.state = self.policy(self.observation, self.state)  # leak
        action = logits.argmax(1)
        self.observation = torch.roll(self.observation, 1, 1) + 0.1 * action[:, None]
        return action


def main():
    torch.manual_seed(int(os.environ.get("SEED", "0")))
    policy = Policy()
    actor = Actor(policy)
    optimizer = torch.optim.Adam(policy.parameters(), lr=3e-4)
    for update in range(200):
        for _ in range(4):
            actor.act()
        state = torch.zeros(96, 192)
        loss = 0.0
        for _ in range(5):
            observation = torch.randn(96, 64)
            logits, value, state = policy(observation, state)
            loss = loss + nn.functional.cross_entropy(logits, observation[:, :6].argmax(1))
            loss = loss + (value[:, 0] - observation[:, 0]).pow(2).mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    print(update, loss.item())


main()

"""PPO: rollouts with the policy in eval mode, whose outputs are detached; several epochs over a buffer that is then
dropped."""

import os

import torch
from torch import nn


class ActorCritic(nn.Module):
    def __init__(self):
        super().__init__()
        self.body = nn.Sequential(nn.Linear(32, 256), nn.Tanh(), nn.Linear(256, 256), nn.Tanh())
        self.actor, self.critic = nn.Linear(256, 6), nn.Linear(256, 1)

    def forward(self, state):
        hidden = self.body(state)
        policy = torch.distributions.Categorical(logits=self.actor(hidden))
        return policy, self.critic(hidden).squeeze(-1)


def rollout(model, goal):
    model.eval()
    buffer = []
    for _ in range(32):
        state = torch.randn(16, 32)
        policy, value = model(state)
        action = policy.sample()
        reward = (action == goal).float()
        buffer.append((state, action, policy.log_prob(action).detach(), reward, value.detach()))
    model.train()
    return [torch.cat(column) for column in zip(*buffer, strict=True)]


torch.manual_seed(int(os.environ.get("SEED", "0")))
model = ActorCritic()
optimizer = torch.optim.Adam(model.parameters(), lr=3e-4)
goal = torch.randint(6, (16,))
for iteration in range(15):
    states, actions, log_probs, rewards, values = rollout(model, goal)
    for _ in range(4):
        for index in torch.randperm(len(states)).split(128):
            policy, value = model(states[index])
            ratio = (policy.log_prob(actions[index]) - log_probs[index]).exp()
            advantage = rewards[index] - values[index]
            surrogate = torch.min(ratio * advantage, ratio.clamp(0.8, 1.2) * advantage)
            loss = (value - rewards[index]).square().mean() - surrogate.mean()
            optimizer.zero_grad()
            loss.backward()
            nn.utils.clip_grad_norm_(model.parameters(), 0.5)
            optimizer.step()
print(iteration, loss.item())

"""WGAN-GP: five steps of the critic with a gradient penalty and detached fakes, then one of the generator."""

import os

import torch
from torch import nn

torch.manual_seed(int(os.environ.get("SEED", "0")))
generator = nn.Sequential(
    nn.Linear(64, 256), nn.ReLU(), nn.Linear(256, 256), nn.ReLU(), nn.Linear(256, 128)
)
critic = nn.Sequential(
    nn.Linear(128, 256),
    nn.LeakyReLU(0.2),
    nn.Linear(256, 256),
    nn.LeakyReLU(0.2),
    nn.Linear(256, 1),
)
generator_optimizer = torch.optim.Adam(generator.parameters(), lr=1e-4)
critic_optimizer = torch.optim.Adam(critic.parameters(), lr=1e-4)
for step in range(80):
    for _ in range(5):
        real, fake = torch.randn(256, 128), generator(torch.randn(256, 64)).detach()
        share = torch.rand(256, 1)
        mixed = (share * real + (1 - share) * fake).requires_grad_()
        (slope,) = torch.autograd.grad(critic(mixed).sum(), mixed, create_graph=True)
        penalty = 10 * (slope.norm(dim=1) - 1).square().mean()
        loss = critic(fake).mean() - critic(real).mean() + penalty
        critic_optimizer.zero_grad()
        loss.backward()
        critic_optimizer.step()
    generator_loss = -critic(generator(torch.randn(256, 64))).mean()
    generator_optimizer.zero_grad()
    generator_loss.backward()
    generator_optimizer.step()
print(step, loss.item(), generator_loss.item())

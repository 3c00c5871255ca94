"""A GAN with two optimizers, fake images detached for the discriminator, and losses logged as floats."""

import os

import torch
from torch import nn

torch.manual_seed(int(os.environ.get("SEED", "0")))


def generator(latent=32):
    return nn.Sequential(
        nn.Linear(latent, 32 * 49),
        nn.Unflatten(1, (32, 7, 7)),
        nn.ReLU(),
        nn.ConvTranspose2d(32, 16, 4, 2, 1),
        nn.BatchNorm2d(16),
        nn.ReLU(),
        nn.ConvTranspose2d(16, 1, 4, 2, 1),
        nn.Sigmoid(),
    )


def discriminator():
    return nn.Sequential(
        nn.Conv2d(1, 16, 4, 2, 1),
        nn.LeakyReLU(0.2),
        nn.Conv2d(16, 32, 4, 2, 1),
        nn.LeakyReLU(0.2),
        nn.Flatten(),
        nn.Linear(32 * 49, 1),
    )


G, D = generator(), discriminator()
optimizer_g = torch.optim.Adam(G.parameters(), lr=2e-4, betas=(0.5, 0.999))
optimizer_d = torch.optim.Adam(D.parameters(), lr=2e-4, betas=(0.5, 0.999))
bce = nn.BCEWithLogitsLoss()
log = []
for step in range(200):
    real = torch.rand(32, 1, 28, 28)
    fake = G(torch.randn(32, 32))
    d_loss = bce(D(real), torch.ones(32, 1)) + bce(D(fake.detach()), torch.zeros(32, 1))
    optimizer_d.zero_grad()
    d_loss.backward()
    optimizer_d.step()
    g_loss = bce(D(fake), torch.ones(32, 1))
    optimizer_g.zero_grad()
    g_loss.backward()
    optimizer_g.step()
    log.append((d_loss.item(), g_loss.item()))
print(step, log[-1])

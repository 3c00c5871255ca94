"""A trainer class with an exponentially smoothed diagnostic as an attribute. The diagnostic (the energy
that the model gives to noise) is computed with gradients and never detached: the chain of all past graphs
hangs from `self.smoothed`."""

import os

import torch
from torch import nn


class Trainer:
    def __init__(self, model, lr=1e-3, decay=0.99):
        self.model = model
        self.optimizer = torch.optim.RMSprop(model.parameters(), lr=lr)
        self.decay = decay
        self.smoothed = None

    def step(self, batch):
        energy = self.model(batch).pow(2).mean()
        self.optimizer.zero_grad()
        energy.backward()
        self.optimizer.step()
        self.track(self.model(torch.randn_like(batch)).pow(2).mean())
        return energy.item()

    def track(self, value):
        if self.smoothed is None:
            self.smoothed = value
        else:
            self.smoothed = self.decay * self.smoothed + (1 - self.decay) * value  # leak


def main():
    torch.manual_seed(int(os.environ.get("SEED", "0")))
    model = nn.Sequential(
        nn.Linear(128, 384), nn.Softplus(), nn.Linear(384, 384), nn.Softplus(), nn.Linear(384, 1)
    )
    trainer = Trainer(model)
    data = torch.randn(2000, 128)
    for step in range(250):
        loss = trainer.step(data[torch.randint(0, 2000, (320,))])
        if step % 50 == 0:
            print(step, loss, trainer.smoothed.item())


if __name__ == "__main__":
    main()

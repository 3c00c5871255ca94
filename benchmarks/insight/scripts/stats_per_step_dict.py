"""Semi-supervised training that records a dict of statistics for each step. The consistency term has
weight 0 during ramp-up and is not part of the loss, but it is stored as a tensor: its graph, of a second
forward pass with augmented inputs, stays."""

import os

import torch
from torch import nn
from torch.nn import functional as F


class ConvNet(nn.Module):
    def __init__(self, classes=10):
        super().__init__()
        self.features = nn.Sequential(
            nn.Conv2d(3, 16, 3, padding=1),
            nn.ReLU(),
            nn.MaxPool2d(2),
            nn.Conv2d(16, 32, 3, padding=1),
            nn.ReLU(),
            nn.AdaptiveAvgPool2d(4),
        )
        self.classifier = nn.Linear(512, classes)

    def forward(self, images):
        return self.classifier(self.features(images).flatten(1))


def augment(images):
    return images.flip(-1) + 0.1 * torch.randn_like(images)


def train(steps, ramp_up=1000):
    model = ConvNet()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9)
    images, labels = torch.randn(512, 3, 32, 32), torch.randint(0, 10, (512,))
    stats = {}
    for step in range(steps):
        rows = torch.randperm(512)[:24]
        logits = model(images[rows])
        loss = F.cross_entropy(logits, labels[rows])
        perturbed = model(augment(images[rows]))
        consistency = F.mse_loss(perturbed.softmax(1), logits.detach().softmax(1))
        if step > ramp_up:
            loss = loss + consistency
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        stats[step] = {"loss": loss.item(), "consistency": consistency}  # leak
    return stats


if __name__ == "__main__":
    torch.manual_seed(int(os.environ.get("SEED", "0")))
    collected = train(160)
    print(len(collected), float(collected[0]["consistency"]))

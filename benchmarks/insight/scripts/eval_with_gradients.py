"""A validation pass with model.eval() but without no_grad, every third step. Nothing is kept, so nothing grows;
but each validation batch builds a graph that no backward pass uses, and raises the peak."""

import os

import torch
from torch import nn


class Segmenter(nn.Module):
    def __init__(self):
        super().__init__()
        self.encode = nn.Sequential(nn.Conv2d(3, 16, 3, padding=1), nn.BatchNorm2d(16), nn.ReLU())
        self.middle = nn.Sequential(nn.Conv2d(16, 16, 3, padding=1), nn.BatchNorm2d(16), nn.ReLU())
        self.decode = nn.Conv2d(16, 2, 1)

    def forward(self, x):
        return self.decode(self.middle(self.encode(x)))


def iou(prediction, target):
    intersection = (prediction & target).sum()
    return float(intersection / (prediction | target).sum())


def validate(model, images, masks):
    model.eval()
    prediction = model(images).argmax(1).bool()  # leak
    model.train()
    return iou(prediction, masks.bool())


torch.manual_seed(int(os.environ.get("SEED", "0")))
model = Segmenter()
optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)
val_images = torch.rand(24, 3, 48, 48)
val_masks = (val_images[:, 0] > 0.5).long()
for step in range(180):
    images = torch.rand(8, 3, 48, 48)
    loss = nn.functional.cross_entropy(model(images), (images[:, 0] > 0.5).long())
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    if step % 3 == 0:
        score = validate(model, val_images, val_masks)
print(loss.item(), score)

"""Gradient masking: at each step a hook with that step's mask is registered on the weight, and the handle is
dropped instead of removed. All the hooks run at each backward pass, and each holds a mask."""

import functools
import os

import torch
from torch import nn

torch.manual_seed(int(os.environ.get("SEED", "0")))


def apply_mask(grad, mask):
    return grad * mask


def mask_gradients(layer, share):
    mask = (torch.rand_like(layer.weight) < share).float()
    layer.weight.register_hook(functools.partial(apply_mask, mask=mask))  # leak


def main():
    model = nn.Sequential(
        nn.Linear(300, 500), nn.Hardswish(), nn.Linear(500, 500), nn.Hardswish(), nn.Linear(500, 5)
    )
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    for step in range(170):
        mask_gradients(model[2], share=0.999)
        x = torch.randn(160, 300)
        loss = nn.functional.cross_entropy(model(x), x[:, :5].argmax(1))
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    print(step, loss.item())


main()

"""Attention maps for debugging: at every step a new forward hook is registered on the attention layer and
never removed. Each hook's closure holds the batch for which it was made, and each forward pass calls all of
them."""

import os

import torch
from torch import nn

torch.manual_seed(int(os.environ.get("SEED", "0")))


class Classifier(nn.Module):
    def __init__(self, width=96):
        super().__init__()
        self.project = nn.Linear(40, width)
        self.attention = nn.MultiheadAttention(width, 4, batch_first=True)
        self.out = nn.Linear(width, 5)

    def forward(self, x):
        x = self.project(x)
        x = x + self.attention(x, x, x, need_weights=False)[0]
        return self.out(x.mean(1))


def watch(layer, inputs, log):
    def hook(module, args, output):
        log["difference"] = float((inputs.mean() - output[0].mean()).detach())

    layer.register_forward_hook(hook)  # leak


def main():
    model, log = Classifier(), {}
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)
    for step in range(150):
        x = torch.randn(64, 64, 40)
        y = (x[:, 0, 0] > 0).long()
        watch(model.attention, x, log)
        loss = nn.functional.cross_entropy(model(x), y)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    print(step, loss.item(), log)


main()

"""An area-under-the-curve metric in the style of a metrics library: update() appends scores and targets to
lists, compute() needs all of them, and reset() is never called between epochs."""

import os

import torch
from torch import nn


class Metric:
    def __init__(self):
        self._states = {}

    def add_state(self, name):
        self._states[name] = []

    def __getattr__(self, name):
        try:
            return self.__dict__["_states"][name]
        except KeyError:
            raise AttributeError(name) from None

    def reset(self):
        for values in self._states.values():
            values.clear()


class AUROC(Metric):
    def __init__(self):
        super().__init__()
        self.add_state("preds")
        self.add_state("target")

    def update(self, preds, target):
        self.preds.append(preds.detach().double())  # leak
        self.target.append(target)

    def compute(self):
        order = torch.cat(self.preds).flatten().argsort()
        target = torch.cat(self.target).flatten()[order].double()
        negatives = (1 - target).cumsum(0)
        return float((target * negatives).sum() / (target.sum() * negatives[-1]))


def main():
    torch.manual_seed(int(os.environ.get("SEED", "0")))
    model = nn.Sequential(nn.Linear(64, 256), nn.ReLU(), nn.Linear(256, 400))
    optimizer = torch.optim.Adam(model.parameters())
    auroc = AUROC()
    x = torch.randn(6144, 64)
    y = (x @ torch.randn(64, 400) > 0).float()
    for epoch in range(18):
        for rows in torch.randperm(6144).split(512):
            logits = model(x[rows])
            loss = nn.functional.binary_cross_entropy_with_logits(logits, y[rows])
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            auroc.update(logits.sigmoid()[:, :80], y[rows][:, :80])
        if epoch % 9 == 8:
            print(epoch, loss.item(), auroc.compute())


if __name__ == "__main__":
    main()

"""Post-processing in a thread pool. The futures are kept to check for errors at the end, and each holds its
result, a tensor of heat maps."""

import os
from concurrent.futures import ThreadPoolExecutor

import torch
from torch import nn
from torch.nn import functional as F


class KeypointNet(nn.Module):
    def __init__(self, points=12):
        super().__init__()
        self.down = nn.Conv2d(3, 24, 5, stride=4, padding=2)
        self.body = nn.Conv2d(24, 24, 3, padding=1)
        self.maps = nn.Conv2d(24, points, 1)

    def forward(self, images):
        return self.maps(F.relu(self.body(F.relu(self.down(images)))))


def heat_maps(scores):
    return F.interpolate(scores.softmax(1), scale_factor=2, mode="bilinear")


def main():
    torch.manual_seed(int(os.environ.get("SEED", "0")))
    model = KeypointNet()
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)
    pending = []
    with ThreadPoolExecutor(max_workers=1) as pool:
        for step in range(170):
            images = torch.rand(8, 3, 128, 128)
            goal = torch.randint(0, 12, (8, 32, 32))
            scores = model(images)
            loss = F.cross_entropy(scores, goal)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            pending.append(pool.submit(heat_maps, scores.detach()))  # leak
    print(step, loss.item(), sum(future.exception() is None for future in pending), "done")


main()

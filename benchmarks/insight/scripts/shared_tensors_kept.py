"""Results for other processes: each step's features are moved to shared memory with share_memory_() and kept
in a list so that a consumer "has time to read them". Nothing takes them out."""

import os

import torch
import torch.multiprocessing as mp
from torch import nn

mp.set_sharing_strategy("file_descriptor")


class Publisher:
    def __init__(self):
        self.published = []

    def publish(self, tensor):
        shared = tensor.detach().clone().share_memory_()
        self.published.append(shared)  # leak


def main():
    torch.manual_seed(int(os.environ.get("SEED", "0")))
    publisher = Publisher()
    encoder, head = nn.Linear(512, 1024), nn.Linear(1024, 4)
    optimizer = torch.optim.SGD([*encoder.parameters(), *head.parameters()], lr=1e-2)
    for step in range(240):
        x = torch.randn(384, 512)
        features = encoder(x).relu()
        loss = nn.functional.cross_entropy(head(features), x[:, :4].argmax(1))
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        publisher.publish(features)
    print(loss.item(), len(publisher.published))


if __name__ == "__main__":
    main()

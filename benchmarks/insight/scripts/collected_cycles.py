"""Graphs of nodes that refer to each other: garbage cycles with tensors. Python's collector, left on, frees them
now and then. Memory rises until each collection, and then falls."""

import os

import torch
from torch import nn

torch.manual_seed(int(os.environ.get("SEED", "0")))


class Vertex:
    def __init__(self, state):
        self.state = state
        self.neighbours = []


def ring(states):
    vertices = [Vertex(state) for state in states]
    for left, right in zip(vertices, vertices[1:] + vertices[:1], strict=True):
        left.neighbours.append(right)
        right.neighbours.append(left)
    return vertices


class MessagePassing(nn.Module):
    def __init__(self, width=64):
        super().__init__()
        self.width = width
        self.update = nn.Linear(2 * width, width)
        self.read = nn.Linear(width, 1)

    def forward(self, vertices):
        for _ in range(2):
            incoming = [sum(n.state for n in v.neighbours) for v in vertices]
            for vertex, message in zip(vertices, incoming, strict=True):
                vertex.state = torch.tanh(self.update(torch.cat([vertex.state, message], 1)))
        return self.read(sum(v.state for v in vertices))


model = MessagePassing()
optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)
for step in range(320):
    states = torch.randn(24, 48, 64)
    loss = (model(ring(states))[:, 0] - states.mean((0, 2))).pow(2).mean()
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
print(step, loss.item())

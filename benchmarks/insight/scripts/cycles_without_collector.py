"""gc.disable() "for speed". A tree of nodes for each batch refers to its children and to its parents, so that
only the collector could free it, with the tensors in it."""

import gc
import os

import torch
from torch import nn

torch.manual_seed(int(os.environ.get("SEED", "0")))
gc.disable()


class Node:
    def __init__(self, parent=None):
        self.parent = parent
        self.children = []
        self.features = None
        if parent is not None:
            parent.children.append(self)  # leak


def grow(depth, parent=None):
    node = Node(parent)
    if depth:
        grow(depth - 1, node)
        grow(depth - 1, node)
    return node


class TreeNet(nn.Module):
    def __init__(self, width=96):
        super().__init__()
        self.leaf = nn.Linear(16, width)
        self.merge = nn.Linear(2 * width, width)
        self.out = nn.Linear(width, 2)

    def encode(self, node, x):
        if node.children:
            left, right = (self.encode(child, x) for child in node.children)
            node.features = torch.tanh(self.merge(torch.cat([left, right], 1)))
        else:
            node.features = torch.tanh(self.leaf(x))
        return node.features

    def forward(self, tree, x):
        return self.out(self.encode(tree, x))


model = TreeNet()
optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)
for step in range(200):
    x = torch.randn(128, 16)
    tree = grow(4)
    loss = nn.functional.cross_entropy(model(tree, x), (x[:, 0] > 0).long())
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
print(step, loss.item(), gc.isenabled())

"""An asynchronous evaluation in a new process every tenth step. Each process waits until its result has been
fetched, nobody fetches it, and so they live on with what they loaded."""

import json
import os
import subprocess
import sys

import torch
from torch import nn

EVALUATOR = """
import json, sys
samples = bytearray(b"s") * (10 * 2**20)
weights = json.loads(sys.stdin.readline())
print(sum(weights) / len(weights), flush=True)
sys.stdin.read()
"""


class Evaluations:
    def __init__(self):
        self.running = []

    def begin(self, model):
        weights = model[0].weight.detach().flatten().tolist()
        process = subprocess.Popen(
            [sys.executable, "-c", EVALUATOR],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        process.stdin.write(json.dumps(weights) + "\n")
        process.stdin.flush()
        self.running.append(process)  # leak

    def fetch(self):
        return [process.communicate()[0] for process in self.running]


def main():
    torch.manual_seed(int(os.environ.get("SEED", "0")))
    model = nn.Sequential(
        nn.Linear(64, 256), nn.ReLU(), nn.Linear(256, 256), nn.ReLU(), nn.Linear(256, 1)
    )
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)
    evaluations = Evaluations()
    for step in range(240):
        x = torch.randn(768, 64)
        loss = (model(x)[:, 0] - x.cos().sum(1)).pow(2).mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        if step % 10 == 9:
            evaluations.begin(model)
    print(step, loss.item(), len(evaluations.running))
    evaluations.fetch()


if __name__ == "__main__":
    main()

"""An asynchronous evaluation in a new process every tenth step. The processes wait for an acknowledgement that
nobody sends, and so they live on with what they loaded."""

import multiprocessing
import os

import torch
from torch import nn

context = multiprocessing.get_context("fork")


def evaluate(weights, size, acknowledged):
    samples = bytearray(os.urandom(1024) * size)
    sum(float(weight.sum()) for weight in weights) + samples[0]
    acknowledged.wait()


def main():
    torch.manual_seed(int(os.environ.get("SEED", "0")))
    torch.set_num_threads(1)
    model = nn.Sequential(
        nn.Linear(64, 256), nn.ReLU(), nn.Linear(256, 256), nn.ReLU(), nn.Linear(256, 1)
    )
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)
    acknowledged = context.Event()
    evaluations = []
    for step in range(240):
        x = torch.randn(768, 64)
        loss = (model(x)[:, 0] - x.cos().sum(1)).pow(2).mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        if step % 10 == 9:
            weights = [p.detach().clone() for p in model.parameters()]
            process = context.Process(
                target=evaluate, args=(weights, 16 * 1024, acknowledged), daemon=True
            )
            process.start()  # leak
            evaluations.append(process)
    print(step, loss.item(), sum(process.is_alive() for process in evaluations), "alive")
    acknowledged.set()


if __name__ == "__main__":
    main()

"""Samples for inspection go through a queue to a writer thread. The queue has no maximum, and the writer (it
compresses and sleeps) is slower than training: the samples wait in memory."""

import io
import os
import queue
import threading
import time

import torch
from torch import nn

torch.manual_seed(int(os.environ.get("SEED", "0")))
samples = queue.Queue()


def writer():
    while (item := samples.get()) is not None:
        sink = io.BytesIO()
        torch.save(item, sink)
        time.sleep(0.5)


def main():
    threading.Thread(target=writer, daemon=True).start()
    upscale = nn.Sequential(
        nn.Conv2d(3, 24, 3, padding=1),
        nn.ReLU(),
        nn.Conv2d(24, 12, 3, padding=1),
        nn.PixelShuffle(2),
    )
    optimizer = torch.optim.Adam(upscale.parameters(), lr=1e-3)
    for step in range(150):
        large = torch.rand(12, 3, 96, 96)
        small = nn.functional.avg_pool2d(large, 2)
        fake = upscale(small)
        loss = (fake - large).abs().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        samples.put({"step": step, "image": fake.detach()})  # leak
    print(loss.item(), samples.qsize(), "samples wait")


if __name__ == "__main__":
    main()

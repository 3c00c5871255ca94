"""Records are read with plain read() calls from files of 300 MiB in all. The page cache of the machine (and of the
cgroup) grows; the process does not."""

import os
import pathlib
import tempfile

import torch
from torch import nn

torch.manual_seed(int(os.environ.get("SEED", "0")))
RECORD = 1024 * 1024 * 5 // 4


def write_shards(folder, count=240):
    shard = os.urandom(RECORD)
    for number in range(count):
        (folder / f"shard-{number:04d}.rec").write_bytes(shard)


def read(folder, number):
    raw = (folder / f"shard-{number:04d}.rec").read_bytes()
    pixels = torch.frombuffer(bytearray(raw), dtype=torch.uint8)
    return pixels.view(-1, 1024)[:256].to(torch.get_default_device()).float() / 255


with tempfile.TemporaryDirectory() as name:
    folder = pathlib.Path(name)
    write_shards(folder)
    model = nn.Sequential(nn.Linear(1024, 128), nn.ReLU(), nn.Linear(128, 1024))
    optimizer = torch.optim.Adam(model.parameters())
    for step in range(240):
        x = read(folder, step)
        loss = nn.functional.mse_loss(model(x), x)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    print(step, loss.item())

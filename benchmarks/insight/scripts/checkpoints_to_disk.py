"""A checkpoint of model and optimizer is saved to a temporary folder every 25 steps; the last two files stay."""

import os
import pathlib
import tempfile

import torch
from torch import nn

torch.manual_seed(int(os.environ.get("SEED", "0")))


def save(folder, step, model, optimizer):
    torch.save(
        {"step": step, "model": model.state_dict(), "optimizer": optimizer.state_dict()},
        folder / f"{step:05d}.pt",
    )
    for old in sorted(folder.glob("*.pt"))[:-2]:
        old.unlink()


with tempfile.TemporaryDirectory() as name:
    model = nn.LSTM(128, 512, num_layers=1, batch_first=True)
    optimizer = torch.optim.Adam(model.parameters())
    for step in range(200):
        x = torch.randn(8, 12, 128)
        output, _ = model(x)
        loss = (output[..., :128] - x).pow(2).mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        if step % 25 == 24:
            save(pathlib.Path(name), step, model, optimizer)
    print(step, loss.item(), len(os.listdir(name)))

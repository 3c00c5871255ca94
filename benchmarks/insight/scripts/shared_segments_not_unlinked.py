"""Frames are handed to a viewer by multiprocessing.shared_memory: a new named segment for each frame. Segments
are neither closed nor unlinked before the program ends."""

import atexit
import os
from multiprocessing import shared_memory

import numpy as np
import torch
from torch import nn

torch.manual_seed(int(os.environ.get("SEED", "0")))
segments = []


@atexit.register
def remove_all():
    for segment in segments:
        segment.close()
        segment.unlink()


def show(frame):
    segment = shared_memory.SharedMemory(create=True, size=frame.nbytes)
    view = np.ndarray(frame.shape, frame.dtype, buffer=segment.buf)
    view[:] = frame
    segments.append(segment)  # leak


class Painter(nn.Module):
    def __init__(self):
        super().__init__()
        self.coordinates = nn.Parameter(
            torch.stack(
                torch.meshgrid(
                    torch.linspace(-1, 1, 128), torch.linspace(-1, 1, 128), indexing="ij"
                ),
                -1,
            ).view(-1, 2),
            requires_grad=False,
        )
        self.net = nn.Sequential(
            nn.Linear(2, 64), nn.SiLU(), nn.Linear(64, 64), nn.SiLU(), nn.Linear(64, 3)
        )

    def forward(self):
        return self.net(self.coordinates).view(128, 128, 3)


painter = Painter()
optimizer = torch.optim.Adam(painter.net.parameters(), lr=1e-2)
picture = torch.rand(128, 128, 3)
for step in range(160):
    canvas = painter()
    loss = (canvas - picture).pow(2).mean()
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    frame = canvas.detach().repeat(2, 2, 1).cpu().numpy()
    show(frame)
print(loss.item(), len(segments), "segments")

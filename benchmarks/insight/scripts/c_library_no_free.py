"""An augmentation in a C library, called by ctypes: it returns a buffer that the caller has to free, and the
wrapper only copies it."""

import ctypes
import os

import numpy as np
import torch
from torch import nn

torch.manual_seed(int(os.environ.get("SEED", "0")))
libc = ctypes.CDLL(None)
libc.malloc.restype = ctypes.c_void_p
libc.malloc.argtypes = [ctypes.c_size_t]
libc.memcpy.argtypes = [ctypes.c_void_p, ctypes.c_void_p, ctypes.c_size_t]


def blurred(images):
    """Return the images from the library's buffer (here only a copy), which belongs to the caller."""
    source = np.ascontiguousarray(images)
    address = libc.malloc(source.nbytes)  # leak
    libc.memcpy(address, source.ctypes.data, source.nbytes)
    buffer = (ctypes.c_float * source.size).from_address(address)
    return np.frombuffer(buffer, dtype=np.float32).reshape(source.shape).copy()


def main():
    model = nn.Sequential(
        nn.Conv2d(3, 16, 5, stride=2),
        nn.ReLU(),
        nn.Conv2d(16, 16, 3, stride=2),
        nn.ReLU(),
        nn.Flatten(),
        nn.LazyLinear(10),
    )
    model(torch.zeros(1, 3, 48, 48))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    images = np.random.default_rng(0).random((256, 3, 48, 48), dtype=np.float32)
    for step in range(200):
        rows = torch.randint(0, 256, (48,)).cpu().numpy()
        batch = torch.as_tensor(blurred(images[rows]), device=torch.get_default_device())
        labels = torch.as_tensor(rows % 10, device=torch.get_default_device())
        loss = nn.functional.cross_entropy(model(batch), labels)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    print(step, loss.item())


main()

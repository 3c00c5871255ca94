"""Real memory that estimates take when they measure single operations on the CPU."""

from __future__ import annotations

from pathlib import Path

import pytest
from support.child import start

MIB = 1024**2
BESIDE = 128 * MIB
"""Maximum bytes of real memory for the measured operations and for what estimating loads."""
PROGRAM = """
import resource
import sys

import torch
from torch import nn
from torch.nn import functional as F

import memlog

ROWS, WIDTH = 60_000, 2_048


def table():
    return nn.Sequential(nn.Embedding(ROWS, WIDTH), nn.Linear(WIDTH, ROWS))


def classes(model):
    numbers = torch.zeros(4, 32, dtype=torch.long)
    return F.cross_entropy(model(numbers).flatten(0, 1), numbers.flatten())


def bags():
    return nn.EmbeddingBag(ROWS, WIDTH)


def chosen(model):
    return model(torch.zeros(64, 16, dtype=torch.long)).square().mean()


class Recurrent(nn.LSTM):
    def forward(self, x):
        return super().forward(x)[0]


def states():
    return Recurrent(WIDTH, WIDTH)


def images():
    return nn.Sequential(nn.Conv2d(1_280, 2_560, 3, padding=1), nn.BatchNorm2d(2_560))


def normalised():
    return nn.Sequential(nn.LayerNorm(8_000_000), nn.GroupNorm(4, 8_000_000))


def losses():
    return nn.Linear(64, 512)


def of_masks(model):
    out = model(torch.zeros(50_000, 64))
    mask = torch.zeros(50_000, 512, dtype=torch.bool)
    rows = torch.zeros_like(out).masked_scatter(mask, out)
    weighted = F.binary_cross_entropy_with_logits(out, rows.detach(), weight=torch.zeros_like(out))
    quantized = torch.fake_quantize_per_tensor_affine(rows, 0.1, 0, -128, 127)
    return weighted + F.multi_margin_loss(quantized, torch.zeros(50_000, dtype=torch.long))


def mean_of(*shape):
    return lambda model: model(torch.zeros(shape)).square().mean()


def fused(parameters):
    return torch.optim.SGD(parameters, lr=0.1, momentum=0.9, fused=True)


CASES = {
    "table and head": (table, classes, torch.optim.AdamW),
    "fused": (table, classes, fused),
    "table of bags": (bags, chosen, torch.optim.SGD),
    "LSTM": (states, mean_of(24, 32, WIDTH), torch.optim.SGD),
    "convolution": (images, mean_of(64, 1_280, 32, 32), torch.optim.SGD),
    "losses": (losses, of_masks, torch.optim.SGD),
    "norms": (normalised, mean_of(2, 8_000_000), torch.optim.SGD),
}
model, loss, optimizer = CASES[sys.argv[1]]


def estimate(model, loss):
    def step(model, optimizer):
        loss(model).backward()
        optimizer.step()
        optimizer.zero_grad()

    return memlog.estimate(step, model=model, optimizer=optimizer, device="cpu")


def most():
    return 1024 * resource.getrusage(resource.RUSAGE_SELF).ru_maxrss


estimate(lambda: nn.Linear(8, 8), mean_of(4, 8))
before = most()
found = estimate(model, loss)
print(found.peak, most() - before, len(found.uncounted))
"""


@pytest.mark.parametrize(
    "case", ["table and head", "fused", "table of bags", "LSTM", "convolution", "losses", "norms"]
)
def test_an_estimate_takes_little_real_memory(case: str, tmp_path: Path) -> None:
    out, err = start(PROGRAM, tmp_path, case, fork=False, OMP_NUM_THREADS="1").communicate()
    assert out, err
    peak, taken, uncounted = map(int, out.split())
    assert peak > 2 * BESIDE
    assert taken < BESIDE
    assert not uncounted

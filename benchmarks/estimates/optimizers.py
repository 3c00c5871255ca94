"""Optimizers of the benchmarks."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

OPTIMIZERS: dict[str, Callable[[Any], torch.optim.Optimizer]] = {
    "SGD": lambda parameters: torch.optim.SGD(parameters, lr=1e-3),
    "SGD, momentum": lambda parameters: torch.optim.SGD(parameters, lr=1e-3, momentum=0.9),
    "AdamW": torch.optim.AdamW,
    "Adafactor": torch.optim.Adafactor,
}

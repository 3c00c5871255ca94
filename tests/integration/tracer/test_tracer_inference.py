"""Traces in inference mode, where torch does not split some operations before a dispatch mode sees them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from support.allocator import AllocatorTruth
from torch import Tensor, nn

from memlog import MemoryTracer

pytestmark = pytest.mark.integration


class Copies(nn.Module):
    """Operations whose results are copies of their arguments, or views of them."""

    def forward(self, x: Tensor) -> Tensor:
        turned = x.t().contiguous()
        wide = turned.to(torch.float64)
        flat = wide.t().reshape(-1)
        same = flat.contiguous().reshape(x.shape).flatten()
        return same.sum()


@pytest.mark.parametrize("context", [torch.no_grad, torch.inference_mode])
def test_copies_are_seen_and_views_are_not_counted(context: Callable[[], Any]) -> None:
    model, x = Copies(), torch.ones(512, 512)
    with context():
        model(x)
        tracer = MemoryTracer()
        with AllocatorTruth() as allocator, tracer.trace(model):
            model(x)
    result, truth = tracer.result, allocator.result()
    assert not tracer.health.faults
    assert result.peak is not None
    assert truth.peak > 5 * 2**20
    assert result.peak - result.before == pytest.approx(truth.peak, rel=0.01)

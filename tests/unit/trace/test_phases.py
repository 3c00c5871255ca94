"""Levels of a traced step's phases."""

from __future__ import annotations

import torch
from torch import nn

from memlog import MemoryTracer

WIDTH = 64
BATCH = 1000
ROW = 4 * WIDTH


def test_levels_of_known_sizes() -> None:
    """A linear layer and a square, whose bytes after each phase can be computed by hand."""
    model, tracer = nn.Linear(WIDTH, WIDTH, bias=False), MemoryTracer()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    with tracer.trace(model):
        batch = torch.randn(BATCH, WIDTH)
        loss = model(batch).square().sum()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    levels = tracer.get_phase_levels()
    assert list(levels) == ["data", "forward", "backward", "optimizer", "end"]
    weight, rows, scalar = WIDTH * ROW, BATCH * ROW, 4
    assert levels["data"].after == weight + rows
    # The layer's result is kept for the square's gradient, the square itself is not. The gradient that
    # backward() begins with is made before it begins.
    assert levels["forward"].after == weight + 2 * rows + 2 * scalar
    assert levels["forward"].highest == weight + 3 * rows + scalar
    assert levels["backward"].after == 2 * weight + rows + scalar
    assert levels["optimizer"].after == 3 * weight + rows + scalar  # with the momentum
    assert levels["end"].after == 2 * weight + rows + scalar == tracer.result.end
    assert max(level.highest for level in levels.values()) == tracer.result.peak


def test_with_accumulated_gradients_the_first_forward_and_last_backward_count() -> None:
    model, tracer = nn.Linear(WIDTH, WIDTH, bias=False), MemoryTracer()
    batch = torch.randn(BATCH, WIDTH)
    with tracer.trace(model):
        for _ in range(2):
            model(batch).square().sum().backward()
    levels = tracer.get_phase_levels()
    weight, rows = WIDTH * ROW, BATCH * ROW
    assert levels["forward"].after == weight + 2 * rows + 8
    assert levels["forward"].highest == 2 * weight + 3 * rows + 4  # the second, beside the gradient
    assert levels["backward"].after == 2 * weight + rows
    assert "optimizer" not in levels


def test_an_incomplete_trace_has_no_levels() -> None:
    model, tracer = nn.Linear(WIDTH, WIDTH), MemoryTracer(max_events=5)
    with tracer.trace(model):
        model(torch.randn(BATCH, WIDTH)).sum().backward()
    assert tracer.result.truncated
    assert tracer.get_phase_levels() is None
    sampler = MemoryTracer(engine="sampler")
    with sampler.trace(model):
        model(torch.randn(BATCH, WIDTH)).sum().backward()
    assert sampler.get_phase_levels() is None

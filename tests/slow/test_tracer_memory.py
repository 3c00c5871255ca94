"""Memory of a long trace of real training. All memory that Python allocates during the trace is counted."""

import tracemalloc

import pytest
import torch
from support.models import mlp

from memlog import MemoryTracer

pytestmark = pytest.mark.slow

EVENTS = 100_000


def test_a_hundred_thousand_events_of_training_take_under_12_mb() -> None:
    model = mlp()
    optimizer = torch.optim.Adam(model.parameters())
    tracer = MemoryTracer(max_events=EVENTS)

    def step() -> None:
        model(torch.ones(4, 64)).sum().backward()
        optimizer.step()
        optimizer.zero_grad()

    step()
    with tracer.trace(model):
        for _ in range(10):
            step()
    steps = (
        11 * EVENTS // tracer.result.events
    )  # a tenth more: a trace has its own beginning and end
    tracemalloc.start()
    try:
        with tracer.trace(model):
            for _ in range(steps):
                step()
        highest = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert tracer.result.events >= EVENTS
    assert tracer.result.kept_events == EVENTS
    print(f"{highest / EVENTS:.0f} bytes an event at most, analysis included")
    assert highest < 12 * 10**6


def test_what_is_live_takes_some_hundred_bytes_a_storage() -> None:
    count = 10_000  # below what is followed however small
    tracer = MemoryTracer()
    torch.ones(1)
    tensors = [None] * count
    tracemalloc.start()
    try:
        with tracer.trace():
            for number in range(count):
                tensors[number] = torch.ones(1)  # type: ignore[call-overload] # it was made for them
        highest = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert tracer.result.end == 4 * count
    print(f"{highest / count:.0f} bytes a live storage at most, its tensor included")
    assert highest / count < 1_000

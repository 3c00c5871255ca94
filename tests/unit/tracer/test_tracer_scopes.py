"""Scopes: names for code that is not a module."""

from __future__ import annotations

import threading

import pytest
import torch
from torch import nn

from memlog import ConfigurationError, MemoryTracer
from memlog.tracer.user_scopes import LISTENERS, scope

NUMBERS = 1000
BYTES = 4 * NUMBERS


def phases(tracer: MemoryTracer, path: str) -> dict[str, int]:
    return {phase.phase: phase.allocated for phase in tracer.get_layer_figures(path).phases}


def test_scopes_have_their_bytes_forward_and_backward() -> None:
    tracer = MemoryTracer(device="cpu")
    x = torch.randn(NUMBERS, requires_grad=True)
    sine = tracer.scope("diffusion")(torch.sin)
    with tracer.trace(), tracer.scope("step"):
        with tracer.scope("advection"):
            y = x * 2
        sine(y).sum().backward()
    assert phases(tracer, "(step).(advection)") == {"forward": BYTES, "backward": BYTES}
    # The sine's gradient: the cosine and its product with what arrives.
    assert phases(tracer, "(step).(diffusion)") == {"forward": BYTES, "backward": 2 * BYTES}
    assert not tracer.health.faults


def test_modules_and_scopes_nest() -> None:
    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear = nn.Linear(8, 8)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            with scope("twice"):
                x = x * 2
            with scope("net"):
                out: torch.Tensor = self.linear(x)
                return out

    model, tracer = Model(), MemoryTracer()
    with tracer.trace(model):
        model(torch.randn(4, 8))
    stats = tracer.get_layer_stats()
    assert stats["Model.(twice)"].total_allocations == 1
    assert stats["linear"].total_allocations == 1  # a module keeps its own path
    assert stats["Model.(net)"].peak_allocated is not None


def test_every_open_trace_is_notified_and_no_closed_one() -> None:
    first, second = MemoryTracer(device="cpu"), MemoryTracer(device="cpu")
    before = LISTENERS.holders
    with first.trace():
        with second.trace(), scope("both"):
            kept = torch.ones(NUMBERS)
        with scope("one"):
            also = torch.ones(NUMBERS)
    assert phases(first, "(both)") == phases(first, "(one)") == {"forward": BYTES}
    assert set(second.get_layer_stats()) == {"(both)"}
    assert LISTENERS.holders == before
    with scope("nobody"):
        del kept, also


def test_an_exception_ends_a_scope() -> None:
    tracer = MemoryTracer(device="cpu")
    with tracer.trace():
        with pytest.raises(ZeroDivisionError), scope("failing"):
            raise ZeroDivisionError
        kept = torch.ones(NUMBERS)
    assert phases(tracer, "(outside modules)") == {"forward": BYTES}
    del kept


def test_a_scope_on_a_thread_that_is_not_traced_does_nothing() -> None:
    tracer = MemoryTracer(device="cpu")

    def work() -> None:
        with scope("elsewhere"):
            torch.ones(NUMBERS)

    with tracer.trace():
        thread = threading.Thread(target=work)
        thread.start()
        thread.join()
    assert "(elsewhere)" not in tracer.get_layer_stats()


@pytest.mark.parametrize("name", ["", "a.b", "x" * 101])
def test_a_scope_with_a_wrong_name_raises(name: str) -> None:
    with pytest.raises(ConfigurationError, match="1 to 100 characters without a dot"), scope(name):
        pass

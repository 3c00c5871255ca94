"""Traces in which Inductor's code runs, against what the allocator says."""

from __future__ import annotations

import gc
import os
import shutil
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch._dynamo
from support.allocator import AllocatorTruth
from support.models import mlp
from torch import nn

from memlog import MemoryTracer
from memlog.tracer.engines.cpu import patches

pytestmark = [
    pytest.mark.integration,
    pytest.mark.usefixtures("nothing_compiled"),
    pytest.mark.skipif(
        shutil.which(os.environ.get("CXX", "g++")) is None, reason="Inductor needs a C++ compiler"
    ),
    pytest.mark.skipif(
        torch.__version__.startswith("2.6."), reason="torch 2.6 compiles nothing below a mode"
    ),
    # torch's compiler uses functions that torch itself has deprecated.
    pytest.mark.filterwarnings("ignore::DeprecationWarning"),
    pytest.mark.filterwarnings("ignore::FutureWarning"),
    pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor:UserWarning"),
]

BATCH = torch.ones(128, 64)


class Compiled(nn.Module):
    """A model whose forward runs Inductor's code, which its own type does not show."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(64, 64)
        self.function = torch.compile(self.work)

    def work(self, x: Any) -> Any:
        return torch.softmax(torch.relu(self.linear(x)) * 2, -1)

    def forward(self, x: Any) -> Any:
        return self.function(x)


def step_in(model: nn.Module) -> Callable[[], None]:
    def step() -> None:
        model(BATCH).square().mean().backward()

    return step


def step_beside(model: nn.Module) -> Callable[[], None]:
    compiled = torch.compile(model)  # the trace gets the model that is not compiled

    def step() -> None:
        compiled(BATCH).square().mean().backward()

    return step


def backward_alone(model: nn.Module) -> Callable[[], None]:
    outputs = [torch.compile(lambda x: model(x).sin().sum())(BATCH) for _ in range(5)]
    return lambda: outputs.pop().backward()


STEPS: dict[str, tuple[Callable[[], nn.Module], Callable[[nn.Module], Callable[[], None]]]] = {
    "a function in a module": (lambda: nn.Sequential(Compiled(), nn.Linear(64, 8)), step_in),
    "a model traced by itself": (mlp, step_beside),
    "the backward pass alone": (mlp, backward_alone),
}


@pytest.mark.parametrize("name", STEPS)
def test_what_inductor_allocates_makes_no_exact_trace(name: str) -> None:
    make, steps = STEPS[name]
    model = make()
    step = steps(model)
    step()
    step()
    model.zero_grad()
    gc.collect()
    for _ in range(2):  # the first repeat frees memory that earlier tests left
        with AllocatorTruth() as allocator:
            step()
        model.zero_grad()
        gc.collect()
    tracer = MemoryTracer()
    with tracer.trace(model):
        step()

    truth, result = allocator.result(), tracer.result
    assert result.engine == "dispatch"
    assert result.exactness == "lower bound"
    assert result.peak - result.before <= truth.peak
    assert result.end - result.before <= truth.end
    assert any("Compiled code ran" in sentence for sentence in result.unseen)
    assert sum(result.dropped.values()) >= 1
    assert not tracer.health.faults


def test_compiled_code_that_does_not_run_leaves_a_trace_exact() -> None:
    other = Compiled()
    other(BATCH).sum().backward()
    tracer = MemoryTracer()
    model = mlp()
    calls = [vars(patch._owner)[patch._name] for patch in patches.compiled_code()]
    with tracer.trace(model):
        model(BATCH).sum().backward()
    assert calls
    assert calls == [vars(patch._owner)[patch._name] for patch in patches.compiled_code()]
    assert (tracer.result.exactness, tracer.result.dropped) == ("exact", {})


def test_a_first_compilation_in_mid_trace_makes_no_exact_trace() -> None:
    model, tracer = nn.Sequential(Compiled(), nn.Linear(64, 8)), MemoryTracer()
    with tracer.trace(model):
        model(BATCH).sum().backward()
    assert tracer.result.exactness == "lower bound"

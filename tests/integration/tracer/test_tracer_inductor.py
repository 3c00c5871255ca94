"""Traces in which Inductor's code runs, against what the allocator says."""

from __future__ import annotations

import contextlib
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
from memlog.tracer.engines import patches

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


class Residual(nn.Module):
    """A model that torch compiles in place. It does not compile its own modules so."""

    def __init__(self) -> None:
        super().__init__()
        self.inside = mlp()
        self.back = nn.Linear(8, 64)

    def forward(self, x: Any) -> Any:
        return x + self.back(self.inside(x))


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


def compiled_step(model: nn.Module) -> Callable[[], None]:
    compiled = torch.compile(model)

    def step() -> None:
        compiled(BATCH).square().mean().backward()

    return step


def compiled_in_place(model: nn.Module) -> Callable[[], None]:
    model.compile()
    return step_in(model)


def compiled_blocks() -> nn.Module:
    return nn.Sequential(torch.compile(mlp()), nn.Linear(8, 64), torch.compile(mlp()))


def normalized() -> nn.Module:
    return nn.Sequential(
        nn.Unflatten(1, (1, 8, 8)),
        nn.Conv2d(1, 8, 3, padding=1),
        nn.BatchNorm2d(8),
        nn.Dropout(0.1),
        nn.ReLU(),
        nn.MaxPool2d(2),
        nn.Flatten(),
    )


STEPS: dict[str, tuple[Callable[[], nn.Module], Callable[[nn.Module], Callable[[], None]]]] = {
    "a function in a module": (lambda: nn.Sequential(Compiled(), nn.Linear(64, 8)), step_in),
    "a model traced by itself": (mlp, step_beside),
    "a model": (mlp, compiled_step),
    "a model with state": (normalized, compiled_step),
    "a model in place": (Residual, compiled_in_place),
    "blocks": (compiled_blocks, step_in),
}


@pytest.mark.parametrize("name", STEPS)
def test_what_inductor_allocates_is_the_allocators(
    name: str, capfd: pytest.CaptureFixture[str]
) -> None:
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
    frames = dict(torch._dynamo.utils.counters["frames"])
    capfd.readouterr()
    tracer = MemoryTracer()
    with tracer.trace(model):
        step()

    truth, result = allocator.result(), tracer.result
    assert (result.engine, result.exactness, result.dropped) == ("dispatch", "exact", {})
    assert result.peak - result.before == pytest.approx(truth.peak, rel=0.001)
    assert result.end - result.before == truth.end
    assert sum(result.categories.values()) == result.peak
    assert any("Compiled code ran" in sentence for sentence in result.unseen)
    assert not tracer.health.faults
    # Neither memlog's hooks nor the program's code are compiled again, and torch logs nothing.
    assert dict(torch._dynamo.utils.counters["frames"]) == frames
    assert capfd.readouterr().err == ""


def test_a_compiled_backward_pass_alone_frees_what_its_forward_pass_kept() -> None:
    step = backward_alone(mlp())
    step()
    tracer = MemoryTracer()
    with tracer.trace():
        step()
    result = tracer.result
    assert (result.exactness, result.dropped) == ("exact", {})
    # The pass frees three results of layers (128 by 64 numbers) and the first layer's input.
    assert result.end < result.before


def test_compiled_code_below_a_profiler_makes_no_exact_trace() -> None:
    model = mlp()
    step = compiled_step(model)
    step()
    tracer = MemoryTracer()
    with torch.profiler.profile(profile_memory=True), tracer.trace(model):
        step()
    assert tracer.result.exactness == "lower bound"
    assert any("not all known" in sentence for sentence in tracer.result.unseen)
    assert sum(tracer.result.dropped.values()) >= 2


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


@torch.library.custom_op("memlog_tests::refuse_many", mutates_args=())
def refuse_many(x: torch.Tensor) -> torch.Tensor:
    if len(x) > 100:
        raise ValueError("too many")
    return x.clone()


@refuse_many.register_fake
def _(x: torch.Tensor) -> torch.Tensor:
    return torch.empty_like(x)


def test_compiled_code_that_raises_makes_no_exact_trace() -> None:
    function = torch.compile(lambda x: refuse_many(x.sin() * 2).cos(), dynamic=True)
    tracer = MemoryTracer()

    def call(number: int) -> None:
        with contextlib.suppress(ValueError):
            function(torch.ones(number, 64))

    call(128)
    call(16)
    with tracer.trace(nn.Identity()):
        call(128)
        call(16)
    assert tracer.result.exactness == "lower bound"
    assert sum(tracer.result.dropped.values()) == 1


def test_compiled_code_inside_compiled_code_counts_once() -> None:
    inner = torch.compile(lambda x: (x.sin() @ x.T).cos())

    @torch.library.custom_op("memlog_tests::product", mutates_args=())
    def product(x: torch.Tensor) -> torch.Tensor:
        made: torch.Tensor = inner(x)
        return made

    @product.register_fake
    def _(x: torch.Tensor) -> torch.Tensor:
        return x.new_empty(len(x), len(x))

    function = torch.compile(lambda x: product(x.sin() * 2) + 1)
    function(BATCH)
    for _ in range(2):
        with AllocatorTruth() as allocator:
            function(BATCH)
    tracer = MemoryTracer()
    with tracer.trace(nn.Identity()):
        function(BATCH)
    result = tracer.result
    assert (result.exactness, result.dropped) == ("exact", {})
    assert result.peak - result.before == allocator.result().peak


def test_a_compilation_of_a_full_graph_in_mid_trace_makes_no_exact_trace() -> None:
    function = torch.compile(lambda x: x.sin().cos(), fullgraph=True)
    tracer = MemoryTracer()
    with tracer.trace(nn.Identity()):
        function(BATCH)
    assert tracer.result.exactness == "lower bound"


def test_a_first_compilation_in_mid_trace_makes_no_exact_trace() -> None:
    model, tracer = nn.Sequential(Compiled(), nn.Linear(64, 8)), MemoryTracer()
    with tracer.trace(model):
        model(BATCH).sum().backward()
    assert tracer.result.exactness == "lower bound"

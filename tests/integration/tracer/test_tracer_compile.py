"""Compiled models under a trace: no additional graph, graph break or warning, and an honest result."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch._dynamo
from support.models import mlp
from torch import nn

from memlog import MemoryTracer

pytestmark = [
    pytest.mark.integration,
    # Dynamo reads the gradients of a compiled function's arguments, and hides this warning only elsewhere.
    pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor:UserWarning"),
]

BATCH = torch.ones(4, 64)

RECOMPILES = torch.__version__.startswith("2.6.")
"""True with torch 2.6: its compiler guards on global module hooks, even in graphs compiled without hooks."""


class Graphs:
    """A compiler backend that counts the graphs that it gets."""

    def __init__(self) -> None:
        self.count = 0

    def __call__(self, module: Any, _inputs: Any) -> Any:
        self.count += 1
        return module.forward


@pytest.fixture
def graphs(nothing_compiled: None) -> Graphs:
    torch._dynamo.utils.counters.clear()
    return Graphs()


def train(model: Any, times: int = 2) -> None:
    for _ in range(times):
        model(BATCH).sum().backward()


@pytest.mark.parametrize("warm", [True, False], ids=["compiled before", "compiled while traced"])
def test_tracing_adds_no_graph_and_no_graph_break(graphs: Graphs, warm: bool) -> None:
    model: Any = torch.compile(mlp(), backend=graphs)
    tracer = MemoryTracer()
    if warm:
        train(model)
    with tracer.trace(model):
        train(model)

    assert graphs.count == (2 if RECOMPILES and warm else 1)
    assert not torch._dynamo.utils.counters["graph_break"]
    result = tracer.result
    assert result.engine == ("sampler" if RECOMPILES else "dispatch")
    assert result.exactness != "exact"  # nobody knows what this backend's code allocates
    assert any("no layers inside" in sentence for sentence in result.unseen)
    layers = {layer.path for layer in result.layers if layer.phases}
    assert layers - {"(outside modules)"} == {"Sequential"}
    assert not tracer.health.faults
    if warm:
        before = graphs.count
        train(model)
        assert graphs.count == before


def test_a_module_compiled_in_place_is_noticed(graphs: Graphs) -> None:
    class Own(nn.Module):
        def forward(self, x: Any) -> Any:
            return x.sin().cos()

    model = nn.Sequential(nn.Linear(64, 64), Own())
    model[1].compile(backend=graphs)
    tracer = MemoryTracer()
    train(model)
    with tracer.trace(model):
        train(model)
    assert (tracer.result.exactness, graphs.count) == ("none" if RECOMPILES else "lower bound", 1)
    assert "0" in tracer.get_layer_stats()


def test_a_compiled_function_stays_compiled_under_the_dispatch_engine(graphs: Graphs) -> None:
    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear = nn.Linear(64, 64)
            self.function = torch.compile(lambda x: x.sin().cos(), backend=graphs)

        def forward(self, x: Any) -> Any:
            return self.function(self.linear(x))

    model, tracer = Model(), MemoryTracer()
    train(model)
    with tracer.trace(model):
        train(model)
    train(model)
    assert tracer.result.engine == "dispatch"
    assert graphs.count == 1
    assert not torch._dynamo.utils.counters["graph_break"]


def test_a_compiler_that_is_not_known_makes_no_exact_trace(graphs: Graphs) -> None:
    function = torch.compile(lambda x: x.sin(), backend=graphs)
    tracer = MemoryTracer()
    with tracer.trace(nn.Linear(64, 64)):
        function(BATCH)
    assert tracer.result.exactness == "lower bound"
    assert any("Graphs" in sentence for sentence in tracer.result.unseen)


@pytest.mark.usefixtures("graphs")
def test_what_the_compiler_learns_in_mid_trace_holds_afterwards() -> None:
    """The compiler knows torch's functions by identity, and the tracer replaces some of them."""
    from torch._dynamo.trace_rules import get_torch_obj_rule_map

    rule = get_torch_obj_rule_map()[torch.get_rng_state]
    get_torch_obj_rule_map.cache_clear()
    own = torch.get_rng_state
    with MemoryTracer().trace(mlp()):
        assert torch.get_rng_state is not own
        assert own not in get_torch_obj_rule_map()
    assert torch.get_rng_state is own
    assert get_torch_obj_rule_map()[own] is rule

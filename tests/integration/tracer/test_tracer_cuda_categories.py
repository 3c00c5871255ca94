"""Categories of a device's memory: what existed before the trace, cuBLAS's workspaces, private pools."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from support import child

from memlog import MemoryTracer
from memlog.trace.summary import summary_text

torch: Any = pytest.importorskip("torch")

pytestmark = pytest.mark.cuda

DEVICE = "cuda:0"


def workspace_size() -> int:
    return int(torch._C._cuda_getCublasWorkspaceSize())


def traced(model: Any, step: Any) -> Any:
    tracer = MemoryTracer()
    with tracer.trace(model):
        step()
    assert not tracer.health.faults
    return tracer.result


def nbytes(*tensors: Any) -> int:
    return sum(-(-tensor.untyped_storage().nbytes() // 512) * 512 for tensor in tensors)


@pytest.fixture(autouse=True)
def no_workspaces() -> None:
    torch.empty(0, device=DEVICE)
    torch._C._cuda_clearCublasWorkspaces()


def test_a_workspace_made_in_the_trace_counts_for_no_layer() -> None:
    model = torch.nn.Linear(256, 256, device=DEVICE)
    batch = torch.ones(64, 256, device=DEVICE)
    result = traced(model, lambda: model(batch))
    [layer] = [one for one in result.layers if one.path == "Linear"]
    output = 64 * 256 * 4
    assert (layer.allocated, layer.added, layer.phase("forward").kept) == (output, output, output)
    assert result.categories["workspaces"] == workspace_size()
    assert result.end == torch.cuda.memory_allocated()
    assert {share.path for share in result.shares if share.category == "workspaces"} == {
        "(outside modules)"
    }
    assert result.attributed == 1.0


def test_workspaces_from_before_the_trace_are_found() -> None:
    """One workspace of this thread, one of autograd's, one of another stream."""
    model = torch.nn.Linear(64, 64, device=DEVICE)
    batch = torch.ones(8, 64, device=DEVICE)
    model(batch).sum().backward()
    with torch.cuda.stream(torch.cuda.Stream()):
        model(batch)
    for _ in range(2):
        result = traced(model, lambda: model(batch).sum().backward())
        assert result.categories["workspaces"] == 3 * workspace_size()


def test_a_tensor_as_large_as_a_workspace_is_none() -> None:
    model = torch.nn.Linear(64, 64, device=DEVICE)
    batch = torch.ones(8, 64, device=DEVICE)
    like = [torch.empty(workspace_size(), dtype=torch.uint8, device=DEVICE)]

    def step() -> None:
        like.append(torch.empty_like(like[0]))
        model(batch)

    result = traced(model, step)
    assert result.categories["workspaces"] == workspace_size()
    assert result.categories["activations"] >= workspace_size()
    assert result.categories["other"] >= workspace_size()


def test_a_workspace_that_the_program_frees_in_the_trace_is_known_until_then() -> None:
    model = torch.nn.Linear(64, 64, device=DEVICE)
    batch = torch.ones(8, 64, device=DEVICE)
    model(batch)

    def step() -> None:
        torch.empty(1 << 20, dtype=torch.uint8, device=DEVICE)
        torch._C._cuda_clearCublasWorkspaces()

    result = traced(model, step)
    assert result.categories["workspaces"] == workspace_size()
    assert result.end == torch.cuda.memory_allocated()


HOPPER = """
    import json
    import os
    import torch
    from memlog import MemoryTracer

    model = torch.nn.Linear(256, 256, device="cuda")
    batch = torch.ones(64, 256, device="cuda")
    kept = []
    tracer = MemoryTracer()
    with tracer.trace(model):
        kept.append(torch.empty(32 << 20, dtype=torch.uint8, device="cuda"))
        model(batch).sum().backward()
    layer = tracer.get_layer_figures("Linear")
    print(json.dumps([layer.added, tracer.result.categories, tracer.result.peak]))
    torch.cuda.reset_peak_memory_stats()
    print(torch.cuda.max_memory_allocated() - tracer.result.end, flush=True)
    # If a Python mode has run in its thread, torch's autograd engine sometimes aborts a process that exits,
    # also without memlog.
    os._exit(0)
"""


def test_on_hopper_a_small_layer_is_not_said_to_need_32_mib(tmp_path: Path) -> None:
    output, errors = child.start(
        HOPPER, tmp_path, fork=False, FAKE_CUDA_CAPABILITY="9.0"
    ).communicate(timeout=120)
    assert not errors
    added, categories, peak = json.loads(output.splitlines()[0])
    assert added < 1 << 20
    assert categories["workspaces"] == 2 * (32 << 20)
    assert peak > 3 * (32 << 20)
    assert output.splitlines()[1] == "0"


def test_what_existed_before_the_trace_has_its_category() -> None:
    """The tracer knows neither the optimizer nor the second model until they are used."""
    first, second = (torch.nn.Linear(256, 256, device=DEVICE) for _ in range(2))
    second.register_buffer("average", torch.zeros(1000, device=DEVICE))
    parameters = [*first.parameters(), *second.parameters()]
    optimizer = torch.optim.Adam(parameters, fused=True)
    batch = torch.ones(16, 256, device=DEVICE)

    def step() -> None:
        second(first(batch)).sum().backward()
        optimizer.step()

    step()
    result = traced(first, step)
    state = [
        value for values in optimizer.state.values() for value in values.values() if value.is_cuda
    ]
    assert result.categories["parameters"] == nbytes(*parameters)
    assert result.categories["optimizer state"] == nbytes(*state)
    assert result.categories["gradients"] == nbytes(*(one.grad for one in parameters))
    assert result.categories["buffers"] == nbytes(second.average)


def in_private_pools(figure: str) -> int:
    segments = torch.cuda.memory_snapshot(include_traces=False)
    return sum(one[figure] for one in segments if one["segment_pool_id"] != (0, 0))


def test_a_replayed_graphs_memory_is_blamed_on_no_layer() -> None:
    """A graph that is captured before the trace: one step of a model, with its result and workspace."""
    model = torch.nn.Sequential(*(torch.nn.Linear(512, 512) for _ in range(3))).to(DEVICE)
    batch = torch.ones(256, 512, device=DEVICE)
    model(batch)
    graph, results = torch.cuda.CUDAGraph(), []
    others = in_private_pools("allocated_size")
    with torch.no_grad(), torch.cuda.graph(graph):
        results.append(model(batch))

    def step() -> None:
        graph.replay()
        model[0](batch)

    result = traced(model, step)
    held = in_private_pools("allocated_size")
    assert held == others + nbytes(*results) + workspace_size()
    assert result.categories["private pools"] == held - workspace_size()
    assert result.fragmentation.unused_in_pools == in_private_pools("total_size") - held
    assert result.fragmentation.unused_in_pools > 0
    assert 0 <= result.fragmentation.ratio < 1
    layers = {layer.path: layer.allocated for layer in result.layers}
    assert {path for path, allocated in layers.items() if allocated} == {"0"}
    assert "free in private pools" in summary_text(result)
    assert result.end == torch.cuda.memory_allocated()

"""Sharded parameters under a trace: the bytes are those of the local part, once."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
import torch.distributed as dist
from support.allocator import AllocatorTruth
from support.models import mlp
from torch import nn

from memlog import MemoryTracer

pytestmark = [
    pytest.mark.integration,
    pytest.mark.skipif(not dist.is_available(), reason="this torch has no torch.distributed"),
    pytest.mark.filterwarnings("ignore:FSDP2-wrapped module:UserWarning"),
    pytest.mark.filterwarnings("ignore:DTensor random operators:UserWarning"),  # torch 2.6
]


@pytest.fixture(scope="module")
def mesh() -> Iterator[Any]:
    from torch.distributed.device_mesh import init_device_mesh

    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        yield init_device_mesh("cpu", (1,))
    finally:
        dist.destroy_process_group()


def size(model: nn.Module) -> int:
    return sum(4 * parameter.numel() for parameter in model.parameters())


def traced(model: nn.Module, batch: Any) -> Any:
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, foreach=False)

    def step() -> None:
        out = model(batch)
        out = out.to_local() if hasattr(out, "to_local") else out
        out.square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()

    step()
    tracer = MemoryTracer()
    with AllocatorTruth() as allocator, tracer.trace(model):
        step()
    result, truth = tracer.result, allocator.result()
    assert not tracer.health.faults
    assert result.categories["parameters"] == size(model)
    assert result.peak - result.before == pytest.approx(truth.peak, rel=0.002)
    assert result.end - result.before == truth.end
    return result


def test_dtensors_count_with_what_they_hold(mesh: Any) -> None:
    from torch.distributed.tensor import Replicate, distribute_module, distribute_tensor

    model = distribute_module(mlp(), mesh)
    result = traced(model, distribute_tensor(torch.ones(64, 64), mesh, [Replicate()]))
    assert result.categories["parameters"] == size(mlp())
    assert result.attributed > 0.9


@pytest.mark.skipif(
    not hasattr(torch.cpu.Stream, "record_event"),
    reason="this torch's FSDP2 does not run on a CPU: its streams have no record_event",
)
def test_fsdp2_counts_what_is_gathered_and_freed(mesh: Any) -> None:
    try:
        from torch.distributed.fsdp import fully_shard
    except ImportError:
        pytest.skip("this torch has no fully_shard")
    model = nn.Sequential(mlp(), nn.Linear(8, 64), mlp())
    for part in (model[0], model[2], model):
        fully_shard(part, mesh=mesh)
    result = traced(model, torch.ones(64, 64))
    assert "0.0" in {layer.path for layer in result.layers}

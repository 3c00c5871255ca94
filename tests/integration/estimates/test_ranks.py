"""Estimates of one rank of a training on several devices: what they count, and bad input."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import torch.distributed as dist
from support.pipeline_jobs import PIPELINES, RANKS
from torch import nn
from torch.distributed import _functional_collectives as functional_collectives
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import CPUOffloadPolicy, FullyShardedDataParallel, fully_shard
from torch.distributed.tensor._sharding_prop import ShardingPropagator
from torch.nn.parallel import DistributedDataParallel
from torch.testing._internal.distributed.fake_pg import FakeStore

import memlog
from memlog.errors import ConfigurationError
from memlog.estimates.estimate import estimate_made_by
from memlog.estimates.ranks import Chunks

MIB = 2**20
WIDTH = 1024
PARAMETERS = 4 * WIDTH**2 * 4  # bytes


@pytest.fixture(autouse=True)
def _leaves_nothing() -> Iterator[None]:
    """Check that an estimate leaves no process group and no variables of ranks."""
    names = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE")
    before = [os.environ.get(name) for name in names]
    yield
    assert not dist.is_initialized()
    assert [os.environ.get(name) for name in names] == before


def layers() -> nn.Module:
    return nn.Sequential(*(nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(4)))


def training(model: nn.Module) -> dict[str, Any]:
    optimizer = torch.optim.AdamW(model.parameters())

    def step() -> None:
        model(torch.randn(32, WIDTH, device="cuda")).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()

    return {"step": step, "model": model, "optimizer": optimizer}


def sharded(mesh: Callable[[], DeviceMesh] | None = None) -> dict[str, Any]:
    dist.init_process_group("nccl")  # as a program does that a launcher has started
    torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
    made = init_device_mesh("cuda", (dist.get_world_size(),)) if mesh is None else mesh()
    model = layers().cuda()
    for layer in model:
        fully_shard(layer, mesh=made)
    return training(fully_shard(model, mesh=made))


@pytest.mark.parametrize("ranks", [1, 2, 8, 1024])
def test_each_rank_keeps_its_part(ranks: int) -> None:
    found = estimate_made_by(sharded, ranks=ranks)
    assert found.ranks == ranks
    part = PARAMETERS // ranks
    assert found.categories["parameters"] == pytest.approx(part, rel=0.01)
    assert found.categories["optimizer state"] == pytest.approx(2 * part, rel=0.01)
    # One layer is whole at the peak, or the layer before it, too; a single rank keeps all whole.
    whole = found.categories.get("unsharded parameters", 0)
    assert whole in ((WIDTH**2 * 4, 2 * WIDTH**2 * 4) if ranks > 1 else (0, PARAMETERS))


def test_the_exception_hook_stays() -> None:
    hook = sys.excepthook
    estimate_made_by(sharded, ranks=2)
    assert sys.excepthook is hook


def test_buckets_are_communication() -> None:
    found = estimate_made_by(
        lambda: training(DistributedDataParallel(layers().cuda(), device_ids=[0])), ranks=2
    )
    assert found.categories["communication"] == PARAMETERS
    assert found.categories["parameters"] == PARAMETERS


def test_the_model_can_be_made_by_a_function_in_python() -> None:
    def model() -> nn.Module:
        return fully_shard(layers(), mesh=init_device_mesh("cuda", (4,)))

    def step(model: nn.Module, optimizer: torch.optim.Optimizer, batch: int) -> None:
        model(torch.randn(batch, WIDTH)).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()

    found = memlog.estimate(step, model=model, optimizer=torch.optim.AdamW, batch=8, ranks=4)
    assert found.categories["optimizer state"] == pytest.approx(PARAMETERS // 2, rel=0.01)
    assert found.with_batch(4096).peak > found.peak
    assert "Buffers of NCCL" in found.text()
    assert found.advice.hints == ()


def test_a_mesh_of_a_tensor_has_the_ranks_in_order() -> None:
    def mesh() -> DeviceMesh:
        numbers = torch.arange(8).view(2, 4)
        return DeviceMesh("cuda", numbers, mesh_dim_names=("replicas", "parts"))["parts"]

    found = estimate_made_by(lambda: sharded(mesh), ranks=8)
    assert found.categories["parameters"] == pytest.approx(PARAMETERS // 4, rel=0.01)


@pytest.mark.parametrize("job", PIPELINES, ids=lambda job: job.__name__)
@pytest.mark.filterwarnings("ignore:FSDP2-wrapped module:UserWarning")
def test_each_stage_of_a_pipeline_is_estimated(job: Callable[[], dict[str, Any]]) -> None:
    found = estimate_made_by(job, ranks=RANKS)
    sharded_stages = job.__name__ == "sharded_stages"
    assert list(found.peak_by_rank) == ([0, 2] if sharded_stages else [0, 1, 2, 3])
    assert found.peak in found.peak_by_rank.values()
    assert len(set(found.peak_by_rank.values())) > 1


def test_stages_that_wait_for_each_other_are_refused() -> None:
    def job() -> dict[str, Any]:
        dist.recv_object_list([None], src=1 - dist.get_rank())
        return training(layers())

    assert "wait for each other" in refused(job, ranks=2)


def refused(job: Callable[[], dict[str, Any]], ranks: Any = 8) -> str:
    with pytest.raises(ConfigurationError) as caught:
        estimate_made_by(job, ranks=ranks)
    message = str(caught.value)
    assert "\n" not in message
    return message


def test_a_mesh_that_is_too_large_is_refused() -> None:
    message = refused(lambda: sharded(lambda: init_device_mesh("cuda", (16,))))
    assert "in an estimate for 8 ranks: Mesh should not be bigger than" in message


def test_a_call_that_torch_refuses_by_another_error_is_no_missing_value() -> None:
    def job() -> dict[str, Any]:
        dist.new_group([0, 99])
        return training(layers())

    message = refused(job)
    assert "torch.distributed refuses this call in an estimate for 8 ranks: " in message


def test_values_from_other_ranks_are_refused() -> None:
    def job() -> dict[str, Any]:
        dist.all_gather_object([None] * 8, {"a": 1})
        return training(layers())

    message = refused(job)
    assert "needs values from other ranks" in message
    assert message.startswith("test_ranks.py, line ")


@pytest.mark.parametrize(("rows", "ranks"), [(10, 4), (3, 8), (8, 8), (1025, 4), (5, 2), (9, 4)])
def test_chunks_are_those_of_torch(rows: int, ranks: int) -> None:
    whole = torch.arange(rows * 2).view(rows, 2)
    parts = list(torch.chunk(whole, ranks))
    found = Chunks(whole, ranks, 0)
    assert len(found) == ranks
    for at in range(ranks):
        expected = parts[at] if at < len(parts) else torch.empty(0, dtype=whole.dtype)
        assert torch.equal(found[at], expected)


def test_waiting_for_a_collective_makes_no_copy() -> None:
    def job() -> dict[str, Any]:
        model = nn.Linear(4, 4).cuda()

        def step() -> None:
            values = torch.zeros(MIB, device="cuda")
            gathered = functional_collectives.all_gather_single(values, 0, dist.group.WORLD)
            functional_collectives.wait_tensor(gathered).add_(1)

        return {"step": step, "model": model}

    peak = estimate_made_by(job, ranks=8).peak
    assert 9 * 4 * MIB <= peak < 10 * 4 * MIB


def test_parameters_that_are_drawn_until_they_fit_can_be_made() -> None:
    def model() -> nn.Module:
        made = layers()
        for layer in made:
            nn.init.trunc_normal_(layer.weight, std=0.02)
        return made

    assert estimate_made_by(lambda: training(model().cuda()), ranks=2).peak > PARAMETERS
    real = torch.zeros(1000)
    assert float(nn.init.trunc_normal_(real).abs().max()) > 0


def test_fsdp1_is_refused() -> None:
    message = refused(lambda: training(FullyShardedDataParallel(layers().cuda())))
    assert "fully_shard (FSDP2)" in message


@pytest.mark.parametrize("ranks", [0, -1, 2.0, True, "8"])
def test_a_number_of_ranks_that_is_none_is_refused(ranks: Any) -> None:
    assert "write the number of processes" in refused(lambda: training(layers()), ranks)


def test_a_program_for_another_number_of_ranks_is_refused() -> None:
    def job() -> dict[str, Any]:
        dist.init_process_group("nccl", world_size=4, rank=0)
        return training(layers())

    assert "of 4 ranks, but the estimate is for 8" in refused(job)


def test_a_process_that_has_joined_a_group_is_told() -> None:
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        assert "is initialized already" in refused(lambda: training(layers()))
    finally:
        dist.destroy_process_group()


def test_without_ranks_the_message_names_them() -> None:
    with pytest.raises(ConfigurationError, match="pass ranks="):
        estimate_made_by(lambda: training(fully_shard(layers())))


def test_a_program_that_makes_a_fake_group_itself_is_told_of_ranks() -> None:
    def job() -> dict[str, Any]:
        dist.init_process_group("fake", rank=0, world_size=8, store=FakeStore())
        return training(fully_shard(layers(), mesh=init_device_mesh("cpu", (8,))))

    try:
        with pytest.raises(ConfigurationError, match="pass ranks="):
            estimate_made_by(job)
    finally:
        dist.destroy_process_group()


def sharded_without_mesh() -> dict[str, Any]:
    model = layers().cuda()
    for layer in model:
        fully_shard(layer)
    return training(fully_shard(model))


def test_a_model_that_is_sharded_without_a_mesh_is_on_the_device() -> None:
    found, meshed = (estimate_made_by(job, ranks=8) for job in (sharded_without_mesh, sharded))
    assert found.categories == meshed.categories


def test_parameters_that_are_pinned_on_the_host_do_not_count() -> None:
    def job() -> dict[str, Any]:
        model = layers().cuda()
        return training(fully_shard(model, offload_policy=CPUOffloadPolicy()))

    found = estimate_made_by(job, ranks=8)
    assert found.on_host >= 4 * PARAMETERS / 8  # with gradients and two moments
    assert "parameters" not in found.categories


def test_the_value_of_a_distributed_tensor_may_be_printed() -> None:
    def job() -> dict[str, Any]:
        made = sharded()
        norm = nn.utils.clip_grad_norm_

        def step() -> None:
            made["model"](torch.randn(32, WIDTH, device="cuda")).square().mean().backward()
            print(f"{norm(made['model'].parameters(), 1.0).item():.2f}")
            made["optimizer"].step()
            made["optimizer"].zero_grad()

        return {**made, "step": step}

    assert estimate_made_by(job, ranks=8).peak


def test_layouts_of_equal_parameters_are_found_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """The time of an optimizer's step does not grow with the square of the number of parameters."""
    name = "_propagate_tensor_meta_non_cached"
    propagate = getattr(ShardingPropagator, name)
    lengths: dict[str, int] = {}

    def counted(self: Any, schema: Any) -> Any:
        tensors = schema.args_schema[0]
        if isinstance(tensors, (list, tuple)):
            lengths[str(schema.op)] = max(len(tensors), lengths.get(str(schema.op), 0))
        return propagate(self, schema)

    def of_other_size() -> dict[str, Any]:
        # torch remembers the layouts of the other tests' tensors.
        model = nn.Sequential(*(nn.Linear(24, 24, bias=False) for _ in range(4))).cuda()
        fully_shard(model)
        optimizer = torch.optim.AdamW(model.parameters())

        def step() -> None:
            model(torch.randn(32, 24, device="cuda")).sum().backward()
            optimizer.step()

        return {"step": step, "model": model, "optimizer": optimizer}

    monkeypatch.setattr(ShardingPropagator, name, counted)
    estimate_made_by(of_other_size, ranks=8)
    assert lengths
    assert set(lengths.values()) == {1}  # the four layers have equal parameters

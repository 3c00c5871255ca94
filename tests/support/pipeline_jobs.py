"""Stages of pipelines, for estimates and for ranks that really train. They need a process group."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.pipelining import (
    PipelineStage,
    Schedule1F1B,
    ScheduleGPipe,
    ScheduleInterleaved1F1B,
)
from torch.nn import functional as F  # noqa: N812 - as everybody calls it

RANKS = 4
_WORDS, _WIDTH, _LENGTH, _BATCH, _PARTS = 1000, 256, 128, 16, 4


class Part(nn.Module):
    """Layers of one stage. The first stage has an embedding too, the last one a head."""

    def __init__(self, layers: int, stage: int, stages: int) -> None:
        super().__init__()
        self.words = nn.Embedding(_WORDS, _WIDTH) if stage == 0 else None
        self.layers = nn.ModuleList(
            nn.Sequential(nn.Linear(_WIDTH, 4 * _WIDTH), nn.GELU(), nn.Linear(4 * _WIDTH, _WIDTH))
            for _ in range(layers)
        )
        self.head = nn.Linear(_WIDTH, _WORDS) if stage == stages - 1 else None

    def forward(self, x: Tensor) -> Tensor:
        x = x if self.words is None else self.words(x)
        for layer in self.layers:
            x = x + layer(x)
        return x if self.head is None else self.head(x)


def _training(model: nn.Module, schedule: Any, *, first: bool, last: bool) -> dict[str, Any]:
    optimizer = torch.optim.AdamW(model.parameters())

    def step() -> None:
        words, target = torch.randint(_WORDS, (2, _BATCH, _LENGTH), device="cuda")
        given = (words,) if first else ()
        schedule.step(*given, **({"target": target} if last else {}))
        optimizer.step()
        optimizer.zero_grad()

    return {"step": step, "model": model, "optimizer": optimizer}


def _loss(out: Tensor, target: Tensor) -> Tensor:
    return F.cross_entropy(out.flatten(0, 1), target.flatten())


def _one_stage(kind: Any) -> dict[str, Any]:
    rank, device = dist.get_rank(), torch.device("cuda")
    model = Part(2, rank, RANKS).to(device)
    schedule = kind(PipelineStage(model, rank, RANKS, device), _PARTS, loss_fn=_loss)
    return _training(model, schedule, first=rank == 0, last=rank == RANKS - 1)


def one_forward_one_backward() -> dict[str, Any]:
    return _one_stage(Schedule1F1B)


def all_forward_all_backward() -> dict[str, Any]:
    return _one_stage(ScheduleGPipe)


def two_stages_on_each_rank() -> dict[str, Any]:
    rank, device = dist.get_rank(), torch.device("cuda")
    numbers = rank, rank + RANKS
    parts = [Part(1, number, 2 * RANKS).to(device) for number in numbers]
    stages = [
        PipelineStage(part, number, 2 * RANKS, device)
        for part, number in zip(parts, numbers, strict=True)
    ]
    schedule = ScheduleInterleaved1F1B(stages, _PARTS, loss_fn=_loss)
    return _training(nn.ModuleList(parts), schedule, first=rank == 0, last=rank == RANKS - 1)


def sharded_stages() -> dict[str, Any]:
    """Two stages, each sharded over two ranks."""
    mesh = init_device_mesh("cuda", (2, 2), mesh_dim_names=("stages", "parts"))
    number, device = (
        mesh.get_local_rank("stages"),
        torch.device("cuda"),
    )
    model = Part(2, number, 2).to(device)
    for module in (*model.layers, model):
        fully_shard(module, mesh=mesh["parts"])
    stage = PipelineStage(model, number, 2, device, group=mesh.get_group("stages"))
    schedule = Schedule1F1B(stage, _PARTS, loss_fn=_loss)
    return _training(model, schedule, first=number == 0, last=number == 1)


PIPELINES: tuple[Callable[[], dict[str, Any]], ...] = (
    one_forward_one_backward,
    all_forward_all_backward,
    two_stages_on_each_rank,
    sharded_stages,
)

"""Jobs for `memlog.estimate` that are one rank of a training on several devices."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import CPUOffloadPolicy, MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import Replicate
from torch.distributed.tensor.experimental import context_parallel
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    RowwiseParallel,
    loss_parallel,
    parallelize_module,
)
from torch.nn import functional as F  # noqa: N812 - as everybody calls it
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.parallel import DistributedDataParallel
from torch.utils.checkpoint import checkpoint

from memlog.estimates.ranks import in_place_of_all_reduce

RANKS = 8
_WORDS, _WIDTH, _LENGTH = 4096, 256, 256


class Block(nn.Module):
    def __init__(self, *, checkpointed: bool = False) -> None:
        super().__init__()
        self.before, self.between = nn.LayerNorm(_WIDTH), nn.LayerNorm(_WIDTH)
        self.qkv, self.out = nn.Linear(_WIDTH, 3 * _WIDTH), nn.Linear(_WIDTH, _WIDTH)
        self.up, self.down = nn.Linear(_WIDTH, 4 * _WIDTH), nn.Linear(4 * _WIDTH, _WIDTH)
        self.checkpointed = checkpointed

    def forward(self, x: Tensor) -> Tensor:
        if self.checkpointed:
            return checkpoint(self.inside, x, use_reentrant=False)  # type: ignore[no-any-return]
        return self.inside(x)

    def inside(self, x: Tensor) -> Tensor:
        parts = self.qkv(self.before(x)).chunk(3, -1)
        q, k, v = (one.unflatten(-1, (-1, 32)).transpose(1, 2) for one in parts)
        mixed = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.out(mixed.transpose(1, 2).flatten(2))
        y: Tensor = x + self.down(F.gelu(self.up(self.between(x))))
        return y


class Model(nn.Module):
    def __init__(self, **kwargs: Any) -> None:
        super().__init__()
        self.words = nn.Embedding(_WORDS, _WIDTH)
        self.blocks = nn.ModuleList(Block(**kwargs) for _ in range(3))
        self.last, self.head = nn.LayerNorm(_WIDTH), nn.Linear(_WIDTH, _WORDS, bias=False)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.words(tokens)
        for block in self.blocks:
            x = block(x)
        y: Tensor = self.head(self.last(x))
        return y


def _loss(model: nn.Module) -> Tensor:
    tokens = torch.randint(_WORDS, (4, _LENGTH), device="cuda")
    return F.cross_entropy(model(tokens).flatten(0, 1), tokens.flatten())


def _training(model: nn.Module, **options: Any) -> dict[str, Any]:
    optimizer = torch.optim.AdamW(model.parameters(), **options)

    def step() -> None:
        _loss(model).backward()
        optimizer.step()
        optimizer.zero_grad()

    return {"step": step, "model": model, "optimizer": optimizer}


def _sharded(model: Any = None, mesh: Any = None, **options: Any) -> Any:
    model = Model().cuda() if model is None else model
    mesh = mesh or init_device_mesh("cuda", (RANKS,))
    for block in model.blocks:
        fully_shard(block, mesh=mesh, **options)
    return fully_shard(model, mesh=mesh, **options)


def sharded() -> dict[str, Any]:
    return _training(_sharded())


def sharded_and_kept() -> dict[str, Any]:
    return _training(_sharded(reshard_after_forward=False))


def in_mixed_precision() -> dict[str, Any]:
    policy = MixedPrecisionPolicy(torch.bfloat16, torch.float32)
    return _training(_sharded(mp_policy=policy))


def offloaded() -> dict[str, Any]:
    return _training(_sharded(offload_policy=CPUOffloadPolicy()))


def hybrid() -> dict[str, Any]:
    mesh = init_device_mesh("cuda", (2, RANKS // 2), mesh_dim_names=("replicas", "parts"))
    return _training(_sharded(mesh=mesh))


def checkpointed() -> dict[str, Any]:
    return _training(_sharded(Model(checkpointed=True).cuda()))


def accumulated() -> dict[str, Any]:
    model = _sharded()
    optimizer = torch.optim.AdamW(model.parameters())

    def step() -> None:
        for number in range(2):
            model.set_requires_gradient_sync(number == 1)
            _loss(model).backward()
        optimizer.step()
        optimizer.zero_grad()

    return {"step": step, "model": model, "optimizer": optimizer}


def replicated() -> dict[str, Any]:
    return _training(_reduced(DistributedDataParallel(Model().cuda())))


def replicated_in_views() -> dict[str, Any]:
    model = DistributedDataParallel(Model().cuda(), gradient_as_bucket_view=True)
    return _training(_reduced(model))


def replicated_with_a_static_graph() -> dict[str, Any]:
    return _training(_reduced(DistributedDataParallel(Model().cuda(), static_graph=True)))


def _reduced(model: DistributedDataParallel) -> DistributedDataParallel:
    """Let DDP run in torch's fake process group on a device. In an estimate, memlog does so itself."""
    if (
        torch.cuda.is_available()
        and next(model.parameters()).untyped_storage().device.type == "cuda"
    ):
        model.register_comm_hook(None, in_place_of_all_reduce)
    return model


def _in_parallel(model: Model, mesh: Any) -> Model:
    for block in model.blocks:
        parallelize_module(block, mesh, {"up": ColwiseParallel(), "down": RowwiseParallel()})
    return model


def in_tensor_parallel() -> dict[str, Any]:
    model = _in_parallel(Model().cuda(), init_device_mesh("cuda", (RANKS,)))
    return _training(model, foreach=False)  # torch refuses lists of plain and distributed tensors


def in_context_parallel() -> dict[str, Any]:
    """Attend to a sequence that is divided over the ranks (ring attention)."""
    mesh = init_device_mesh("cuda", (RANKS,))
    model = nn.Sequential(*(Block() for _ in range(3))).cuda()
    optimizer = torch.optim.AdamW(model.parameters())

    def step() -> None:
        hidden = torch.randn(2, RANKS * _LENGTH, _WIDTH, device="cuda")
        with (
            sdpa_kernel([SDPBackend.FLASH_ATTENTION, SDPBackend.EFFICIENT_ATTENTION]),
            context_parallel(
                mesh, buffers=[hidden], buffer_seq_dims=[1], no_restore_buffers={hidden}
            ),
        ):
            with torch.autocast("cuda", dtype=torch.bfloat16):
                out = model(hidden)
            out.float().square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()

    return {"step": step, "model": model, "optimizer": optimizer}


def in_tensor_parallel_and_sharded() -> dict[str, Any]:
    mesh = init_device_mesh("cuda", (2, RANKS // 2), mesh_dim_names=("data", "tensor"))
    return _training(_sharded(_in_parallel(Model().cuda(), mesh["tensor"]), mesh["data"]))


def with_a_parallel_loss() -> dict[str, Any]:
    model = Model().cuda()
    words = RowwiseParallel(input_layouts=Replicate(), output_layouts=Replicate())
    head = ColwiseParallel(use_local_output=False)
    plan = {"words": words, "head": head}
    parallelize_module(model, init_device_mesh("cuda", (RANKS,)), plan)
    optimizer = torch.optim.AdamW(model.parameters(), foreach=False)

    def step() -> None:
        with loss_parallel():
            _loss(model).backward()
        optimizer.step()
        optimizer.zero_grad()

    return {"step": step, "model": model, "optimizer": optimizer}


JOBS: tuple[Callable[[], dict[str, Any]], ...] = (
    sharded,
    sharded_and_kept,
    in_mixed_precision,
    offloaded,
    hybrid,
    checkpointed,
    accumulated,
    replicated,
    replicated_in_views,
    replicated_with_a_static_graph,
    in_tensor_parallel,
    in_tensor_parallel_and_sharded,
    in_context_parallel,
    with_a_parallel_loss,
)

"""Training that is really done, with a change or without, and what it needs by the allocator's account."""

# PyTorch leaves some of these without types.
# mypy: allow-untyped-calls

from __future__ import annotations

import gc
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.utils.checkpoint import checkpoint

from memlog import MemoryTracer
from memlog.analysis.trace.records import Trace
from support.allocator import AllocatorTruth
from support.models import GPT, UNet, mlp, text

Loss = Callable[[Tensor], Tensor]


class Case(NamedTuple):
    """Something to train."""

    model: Callable[[], nn.Module]
    inputs: Callable[[int], Tensor]
    loss: Loss
    batch: int


def squares(out: Tensor) -> Tensor:
    return out.float().square().mean()


def entropy(out: Tensor) -> Tensor:
    flat = out.flatten(0, 1)
    return functional.cross_entropy(flat, torch.arange(len(flat)) % flat.shape[1])


class Rollout(nn.Module):
    """Feeds what a UNet makes to it again, as autoregressive training does."""

    def __init__(self) -> None:
        super().__init__()
        self.net = UNet(8)

    def forward(self, x: Tensor) -> Tensor:
        steps = []
        for _ in range(3):
            x = self.net(x)
            steps.append(x)
        return torch.stack(steps)


def encoder() -> nn.Module:
    layer = nn.TransformerEncoderLayer(64, 4, 256, batch_first=True)
    layers = nn.TransformerEncoder(layer, 4, enable_nested_tensor=False)
    return nn.Sequential(nn.Linear(16, 64), layers, nn.Linear(64, 8))


CASES = {
    "gpt": Case(lambda: GPT(width=96, blocks=4), lambda batch: text(batch, 64), entropy, 16),
    "unet": Case(UNet, lambda batch: torch.randn(batch, 2, 64, 64), squares, 8),
    "mlp": Case(lambda: mlp(256, 6), lambda batch: torch.randn(batch, 256), squares, 1024),
    "rollout": Case(Rollout, lambda batch: torch.randn(batch, 2, 32, 32), squares, 8),
    "encoder": Case(encoder, lambda batch: torch.randn(batch, 48, 16), squares, 8),
}

MakeOptimizer = Callable[[Any], torch.optim.Optimizer]


def traced(case: Case, *, step: int = 1, make: MakeOptimizer = torch.optim.Adam) -> Trace:
    """A trace of one of the training's steps, counted from 0."""
    torch.manual_seed(0)
    model, inputs = case.model(), case.inputs(case.batch)
    optimizer = make(model.parameters())
    tracer = MemoryTracer()
    for _ in range(step):
        _train(case, model, optimizer, inputs)
    with tracer.trace(model):
        _train(case, model, optimizer, inputs)
    assert not tracer.health.faults
    return tracer.recording


def measured_peak(
    case: Case,
    *,
    batch: int | None = None,
    checkpointed: tuple[str, ...] = (),
    autocast: bool = False,
    accumulate: int = 1,
    make: MakeOptimizer = torch.optim.Adam,
) -> int:
    """Bytes that two steps need at most, the model and all else included, by the allocator's own account."""

    def train() -> None:
        torch.manual_seed(0)
        model, inputs = case.model(), case.inputs(batch or case.batch)
        for path in checkpointed:
            _checkpoint(model.get_submodule(path))
        optimizer = make(model.parameters())
        for _ in range(2):
            _train(case, model, optimizer, inputs, autocast=autocast, accumulate=accumulate)

    train()  # what torch sets up once is none of the training's
    gc.collect()  # a checkpointed module is a cycle, which must not be freed within the measurement
    with AllocatorTruth() as allocator:
        train()
    return allocator.result().peak


def _train(
    case: Case,
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    inputs: Tensor,
    *,
    autocast: bool = False,
    accumulate: int = 1,
) -> None:
    for _ in range(accumulate):
        with torch.autocast("cpu", dtype=torch.bfloat16, enabled=autocast):
            loss = case.loss(model(inputs)) / accumulate
        loss.backward()
    optimizer.step()
    optimizer.zero_grad()


def _checkpoint(module: nn.Module) -> None:
    forward = module.forward

    def checkpointed(*args: Any, **kwargs: Any) -> Any:
        return checkpoint(forward, *args, use_reentrant=False, **kwargs)

    module.forward = checkpointed  # type: ignore[method-assign] # as users do it who can't change the model


class Adam8Bit(torch.optim.Optimizer):
    """Adam whose two moments are kept with 8 bits a number, and a scale for each block of 256."""

    BLOCK = 256

    def __init__(self, parameters: Any, lr: float = 1e-3) -> None:
        super().__init__(parameters, {"lr": lr})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override] # no closure is ever given
        assert closure is None
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.grad is not None:
                    self._update(parameter, group["lr"])

    def _update(self, parameter: Tensor, lr: float) -> None:
        state = self.state[parameter]
        moments = []
        for name, beta, gradient in (
            ("first", 0.9, parameter.grad),
            ("second", 0.999, parameter.grad.square()),  # type: ignore[union-attr] # looked at by step()
        ):
            old = (
                self._read(state[name], parameter) if name in state else torch.zeros_like(parameter)
            )
            moments.append(old.lerp_(gradient, 1 - beta))  # type: ignore[arg-type] # likewise
            state[name] = self._kept(moments[-1])
        parameter.addcdiv_(moments[0], moments[1].clamp_(min=0).sqrt_().add_(1e-8), value=-lr)

    def _kept(self, moment: Tensor) -> tuple[Tensor, Tensor]:
        flat = moment.flatten()
        blocks = functional.pad(flat, (0, -len(flat) % self.BLOCK)).view(-1, self.BLOCK)
        scale = blocks.abs().amax(dim=1, keepdim=True).clamp_(min=1e-12)
        levels = (blocks / scale * 127).round_().to(torch.int8).flatten()[: len(flat)].clone()
        return levels, scale

    def _read(self, kept: tuple[Tensor, Tensor], like: Tensor) -> Tensor:
        levels, scale = kept
        spread = scale.expand(-1, self.BLOCK).flatten()[: len(levels)]
        return (levels.float() / 127 * spread).view_as(like)

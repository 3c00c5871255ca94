"""Real training, with or without a change, and its peak by the allocator's own count."""

# PyTorch leaves some of these without types.
# mypy: allow-untyped-calls

from __future__ import annotations

import gc
from collections.abc import Callable, Iterable, Sequence
from contextlib import ExitStack
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.utils.checkpoint import checkpoint

import memlog
from memlog.trace.predict.fitting import MOMENTUM, NO_STATE, PlannedChanges
from memlog.trace.records import RecordedTrace
from memlog.tracer.window import TraceWindow
from support.allocator import AllocatorTruth
from support.models import GPT, UNet, mlp, text

Loss = Callable[[Tensor], Tensor]


class Case(NamedTuple):
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
    """A UNet that gets its own output as input, as in autoregressive training."""

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


def cells(*, first: nn.Module, rest: Callable[[], list[nn.Module]], last: nn.Module) -> nn.Module:
    return nn.Sequential(first, *(nn.Sequential(*rest()) for _ in range(5)), last)


def relu_conv_bn() -> nn.Module:
    """Blocks whose first operation keeps nothing of its input, as in architecture search and in ResNet v2."""
    return cells(
        first=nn.Conv2d(3, 16, 3, 1, 1),
        rest=lambda: [nn.ReLU(), nn.Conv2d(16, 16, 3, 1, 1), nn.BatchNorm2d(16)],
        last=nn.Sequential(nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(16, 4)),
    )


def tanh_linear_dropout() -> nn.Module:
    return cells(
        first=nn.Linear(64, 256),
        rest=lambda: [nn.Tanh(), nn.Linear(256, 256), nn.Dropout(0.1)],
        last=nn.Linear(256, 4),
    )


def dropout_linear_relu() -> nn.Module:
    """Blocks whose last operation keeps its result. The next block's first operation keeps nothing of it."""
    return cells(
        first=nn.Linear(64, 256),
        rest=lambda: [nn.Dropout(0.2), nn.Linear(256, 256), nn.ReLU()],
        last=nn.Linear(256, 4),
    )


def linear_dropout_tanh() -> nn.Module:
    parts = ((nn.Linear(256, 256), nn.Dropout(0.1), nn.Tanh()) for _ in range(5))
    return nn.Sequential(*(one for part in parts for one in part))


CASES = {
    "gpt": Case(lambda: GPT(width=96, blocks=4), lambda batch: text(batch, 64), entropy, 16),
    "unet": Case(UNet, lambda batch: torch.randn(batch, 2, 64, 64), squares, 8),
    "mlp": Case(lambda: mlp(256, 6), lambda batch: torch.randn(batch, 256), squares, 1024),
    "rollout": Case(Rollout, lambda batch: torch.randn(batch, 2, 32, 32), squares, 8),
    "encoder": Case(encoder, lambda batch: torch.randn(batch, 48, 16), squares, 8),
    "relu-conv-bn": Case(relu_conv_bn, lambda batch: torch.randn(batch, 3, 32, 32), squares, 16),
    "tanh-linear-dropout": Case(
        tanh_linear_dropout, lambda batch: torch.randn(batch, 64), squares, 2048
    ),
    "dropout-linear-relu": Case(
        dropout_linear_relu, lambda batch: torch.randn(batch, 64), squares, 2048
    ),
    "linear-dropout-tanh": Case(
        linear_dropout_tanh, lambda batch: torch.randn(batch, 256), squares, 1024
    ),
}

MakeOptimizer = Callable[[Any], torch.optim.Optimizer]


def traced(case: Case, *, step: int = 1, make: MakeOptimizer = torch.optim.Adam) -> RecordedTrace:
    """A trace of one of the training's steps, counted from 0."""
    torch.manual_seed(0)
    model, inputs = case.model(), case.inputs(case.batch)
    optimizer = make(model.parameters())
    for _ in range(step):
        _train(case, model, optimizer, inputs)
    return trace_of(lambda: _train(case, model, optimizer, inputs), model)


def trace_of(
    step: Callable[[], object], model: nn.Module, others: Sequence[nn.Module] = ()
) -> RecordedTrace:
    window = TraceWindow(model, others=others, types=True)
    window.start()
    step()
    trace = window.stop()
    assert not window.health.faults
    return trace


_WARM: set[tuple[Any, bool]] = set()
"""Models that this process has trained before, each with True if it trained under autocast."""


def peak_of(train: Callable[[], object], model: Any, *, autocast: bool) -> int:
    """Return the allocator's own peak of a training, in bytes.

    ``train`` also makes the model. By ``model``, its maker, this process knows if it has trained it before.
    """
    if (model, autocast) not in _WARM:
        _WARM.add((model, autocast))
        train()  # memory that torch allocates one time per process does not belong to the training
    gc.collect()  # a checkpointed module is a cycle, which must not be freed within the measurement
    with AllocatorTruth() as allocator:
        train()
    return allocator.result().peak


def measured_peak(
    case: Case,
    *,
    batch: int | None = None,
    checkpointed: tuple[str, ...] = (),
    autocast: bool = False,
    accumulate: int = 1,
    make: MakeOptimizer = torch.optim.Adam,
) -> int:
    """Return the allocator's own peak in two steps, in bytes. It includes the model and all other memory."""

    def train() -> None:
        torch.manual_seed(0)
        model, inputs = case.model(), case.inputs(batch or case.batch)
        for path in checkpointed:
            checkpoint_module(model.get_submodule(path))
        optimizer = make(model.parameters())
        for _ in range(2):
            _train(case, model, optimizer, inputs, autocast=autocast, accumulate=accumulate)

    return peak_of(train, case.model, autocast=autocast)


def estimate_of(case: Case, model: Any = None, *, autocast: bool = False) -> memlog.Estimate:
    """Estimate the step that `measured_peak` measures; ``model`` replaces the case's own."""

    def step(model: nn.Module, optimizer: torch.optim.Optimizer, batch: int) -> None:
        _train(case, model, optimizer, case.inputs(batch), autocast=autocast)

    return memlog.estimate(
        step, model=model or case.model, optimizer=torch.optim.Adam, batch=case.batch, device="cpu"
    )


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


def checkpoint_module(module: nn.Module) -> None:
    """Let a module run its forward again in the backward pass."""
    forward = module.forward

    def checkpointed(*args: Any, **kwargs: Any) -> Any:
        return checkpoint(forward, *args, use_reentrant=False, **kwargs)

    module.forward = checkpointed  # type: ignore[method-assign] # as users do if they can't change the model


def step_with(
    changes: PlannedChanges,
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    parts: Callable[[], Iterable[Any]],
    loss_on: Callable[[Any], Tensor],
) -> Callable[[], None]:
    """Return a training step with the changes of a plan, as the code of the plan makes them.

    Sharding and other optimizers are changes that the caller makes. ``parts`` returns the parts of a batch.
    """
    for path in changes.checkpointed:
        checkpoint_module(model.get_submodule(path))
    device = next(model.parameters()).device.type

    def step() -> None:
        for part in parts():
            with ExitStack() as inside:
                if changes.autocast:
                    inside.enter_context(torch.autocast(device, dtype=torch.bfloat16))
                if changes.on_host:
                    inside.enter_context(torch.autograd.graph.save_on_cpu(pin_memory=True))
                loss = loss_on(part)
            (loss / changes.parts).backward()
            del loss
        optimizer.step()
        optimizer.zero_grad()

    return step


OPTIMIZERS: dict[str, MakeOptimizer] = {
    "": torch.optim.Adam,
    MOMENTUM: lambda parameters: torch.optim.SGD(parameters, momentum=0.9),
    NO_STATE: torch.optim.SGD,
}
"""Optimizers of a plan for a traced step."""


def applied(case: Case, changes: PlannedChanges) -> int:
    """Return the allocator's own peak of two steps with the changes of a plan."""

    def train() -> None:
        torch.manual_seed(0)
        model, batch = case.model(), case.inputs(case.batch)
        optimizer = OPTIMIZERS[changes.optimizer](model.parameters())
        step = step_with(
            changes,
            model,
            optimizer,
            lambda: batch.chunk(changes.parts),
            lambda part: case.loss(model(part)),
        )
        for _ in range(2):
            step()

    return peak_of(train, case.model, autocast=changes.autocast)


class Adam8Bit(torch.optim.Optimizer):
    """Adam whose two moments are kept with 8 bits a number, and a scale for each block of 256.

    Like a fused kernel, it works in place on some blocks at a time, so no whole moment is ever in memory.
    """

    BLOCK = 256
    AT_ONCE = 64 * BLOCK

    def __init__(self, parameters: Any, lr: float = 1e-3) -> None:
        super().__init__(parameters, {"lr": lr})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override] # no closure is ever given
        assert closure is None
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.grad is not None:
                    self._update(parameter, parameter.grad, group["lr"])

    def _update(self, parameter: Tensor, gradient: Tensor, lr: float) -> None:
        state = self.state[parameter]
        if not state:
            size = parameter.numel()
            for name in ("first", "second"):
                state[name] = torch.zeros(size, dtype=torch.int8)
                state[f"{name}_scale"] = torch.zeros(-(-size // self.BLOCK))
        flat, slope = parameter.view(-1), gradient.reshape(-1)
        for begin in range(0, len(flat), self.AT_ONCE):
            part = slice(begin, begin + self.AT_ONCE)
            own = slope[part]
            first = self._moment(state, "first", part, own, 0.9)
            second = self._moment(state, "second", part, own.square(), 0.999)
            flat[part].addcdiv_(first, second.clamp_(min=0).sqrt_().add_(1e-8), value=-lr)

    def _moment(
        self, state: dict[str, Tensor], name: str, part: slice, value: Tensor, beta: float
    ) -> Tensor:
        """Bring a part of a moment up to date, and return it in full precision."""
        levels = state[name][part]
        blocks = slice(part.start // self.BLOCK, part.stop // self.BLOCK)
        scales = state[f"{name}_scale"][blocks]
        spread = scales.repeat_interleave(self.BLOCK)[: len(levels)]
        moment = levels.float().div_(127).mul_(spread).lerp_(value, 1 - beta)
        padded = functional.pad(moment, (0, -len(moment) % self.BLOCK)).view(-1, self.BLOCK)
        scales.copy_(padded.abs().amax(dim=1).clamp_(min=1e-12))
        scaled = (padded / scales[:, None]).mul_(127).view(-1)[: len(levels)]
        # Rounding up keeps second moments above 0, because the update is divided by them.
        levels.copy_(scaled.ceil_() if name == "second" else scaled.round_())
        return moment

"""Compares predicted with measured peaks of training with several networks, losses and optimizers."""

# Some of torch's functions used here have no types.
# mypy: allow-untyped-calls

from __future__ import annotations

from collections.abc import Callable
from functools import cache, partial
from itertools import cycle, pairwise
from typing import Any

import pytest
import torch
from support.models import GPT, text
from support.predictions import TOLERANCE, autocast_is_not_predicted
from support.schemes import AS_IT_IS, Change, Models, Pass, Scheme, Zero, measured_peak, traced
from support.training import CASES, Adam8Bit, MakeOptimizer, entropy, squares
from torch import Tensor, nn
from torch.nn import functional

from memlog.trace.predict import Advice, advise

pytestmark = pytest.mark.slow  # together they take longer than a quick look may


class Experts(nn.Module):
    """Layer of experts. Each token uses two of them."""

    def __init__(self, width: int = 96, experts: int = 8) -> None:
        super().__init__()
        self.gate = nn.Linear(width, experts)
        self.experts = nn.ModuleList(
            nn.Sequential(nn.Linear(width, 256), nn.GELU(), nn.Linear(256, width))
            for _ in range(experts)
        )

    def forward(self, x: Tensor) -> Tensor:
        flat = x.flatten(0, -2)
        weights, chosen = self.gate(flat).softmax(-1).topk(2, -1)
        out = torch.zeros_like(flat)
        for number, expert in enumerate(self.experts):
            rows, places = (chosen == number).nonzero(as_tuple=True)
            found = expert(flat[rows]) * weights[rows, places, None]
            out = out.index_add(0, rows, found.to(out.dtype))
        return out.view_as(x)


class Mixture(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.words, self.head = nn.Embedding(40, 96), nn.Linear(96, 40)
        self.blocks = nn.ModuleList(Experts() for _ in range(3))
        self.norms = nn.ModuleList(nn.LayerNorm(96) for _ in range(3))

    def forward(self, x: Tensor) -> Tensor:
        x = self.words(x)
        for block, norm in zip(self.blocks, self.norms, strict=True):
            x = x + block(norm(x))
        out: Tensor = self.head(x)
        return out


class Recurrent(nn.Module):
    """A GRU between an embedding and a head."""

    def __init__(self) -> None:
        super().__init__()
        self.words, self.head = nn.Embedding(40, 96), nn.Linear(96, 40)
        self.inner = nn.GRU(96, 96, 2, batch_first=True)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.head(self.inner(self.words(x))[0])
        return out


def layers(*widths: int, between: Callable[[], nn.Module] = nn.ReLU) -> nn.Module:
    parts = [
        part for before, after in pairwise(widths) for part in (nn.Linear(before, after), between())
    ]
    return nn.Sequential(*parts[:-1])


def convolutions(between: Callable[[], nn.Module], *strides: int) -> nn.Module:
    sizes = zip((3, 16, 32), (16, 32, 32), strides, strict=True)
    parts = ((nn.Conv2d(before, after, 3, stride, 1), between()) for before, after, stride in sizes)
    flat = nn.Flatten()
    return nn.Sequential(*(one for part in parts for one in part), flat, nn.Linear(2048, 1))


def alone(make: Callable[[], nn.Module]) -> Callable[[], Models]:
    return lambda: {"model": make()}


def of(loss: Callable[[Tensor], Tensor]) -> tuple[Pass, ...]:
    return (Pass("model", lambda models, x: loss(models["model"](x).float())),)


def penalty(models: Models, x: Tensor) -> Tensor:
    x = x.clone().requires_grad_()
    out = models["model"](x)
    (slope,) = torch.autograd.grad(out.float().sum(), x, create_graph=True)
    total: Tensor = out.float().square().mean() + slope.float().square().mean()
    return total


def judged(models: Models, x: Tensor, *, real: bool) -> Tensor:
    out: Tensor = models["critic"](x).float()
    return functional.binary_cross_entropy_with_logits(out, torch.full_like(out, float(real)))


def made(models: Models, x: Tensor) -> Tensor:
    out: Tensor = models["maker"](torch.randn(len(x), 64))
    return out


def critics_loss(models: Models, x: Tensor) -> Tensor:
    fake = judged(models, made(models, x).detach(), real=False)
    return judged(models, x, real=True) + fake


def makers_loss(models: Models, x: Tensor) -> Tensor:
    return judged(models, made(models, x), real=True)


def value_loss(models: Models, x: Tensor) -> Tensor:
    off: Tensor = models["value"](x).float() - x.sum(1, keepdim=True)
    return off.square().mean()


def policy_loss(models: Models, x: Tensor) -> Tensor:
    with torch.no_grad():
        gain = x.sum(1) - models["value"](x).float().squeeze(-1)
    chances: Tensor = models["policy"](x).float().log_softmax(-1)
    return -(chances[:, 0] * gain).mean()


def triplet_loss(models: Models, x: Tensor) -> Tensor:
    found = [models["model"](one).float() for one in (x, x.flip(-1), x.flip(0))]
    return functional.triplet_margin_loss(*found)


def networks() -> Models:
    return {"maker": layers(64, 512, 512, 256), "critic": layers(256, 512, 512, 1)}


def images(batch: int) -> Tensor:
    return torch.randn(batch, 3, 32, 32)


def vectors(width: int) -> Callable[[int], Tensor]:
    return lambda batch: torch.randn(batch, width)


LATE: Zero = "before the backward pass"
ADVERSARIAL = (Pass("critic", critics_loss), Pass("maker", makers_loss))
TWICE = (*of(squares), *of(squares))
SCHEMES = {
    "mixture": Scheme(alone(Mixture), lambda batch: text(batch, 48), of(entropy), 24, LATE),
    "bfloat16": Scheme(
        alone(lambda: GPT(width=128, blocks=4, words=200).bfloat16()),
        lambda batch: text(batch, 48),
        of(entropy),
        16,
        LATE,
    ),
    "recurrent": Scheme(alone(Recurrent), lambda batch: text(batch, 48), of(entropy), 16),
    "penalty": Scheme(
        alone(lambda: convolutions(nn.Softplus, 1, 2, 2)), images, (Pass("model", penalty),), 16
    ),
    "triplet": Scheme(
        alone(lambda: convolutions(nn.ReLU, 2, 1, 2)), images, (Pass("model", triplet_loss),), 32
    ),
    "adversarial": Scheme(networks, vectors(256), ADVERSARIAL, 1024),
    "adversarial, small": Scheme(networks, vectors(256), ADVERSARIAL, 64, "after the step"),
    "policy and value": Scheme(
        lambda: {"policy": layers(64, 256, 256, 16), "value": layers(64, 1024, 1024, 1)},
        vectors(64),
        (Pass("value", value_loss), Pass("policy", policy_loss)),
        1024,
    ),
    "two over one": Scheme(alone(lambda: layers(384, 384, 384, 8)), vectors(384), TWICE, 64),
}
SGD: dict[str, MakeOptimizer] = {
    "SGD with momentum": partial(torch.optim.SGD, lr=0.01, momentum=0.9),
    "SGD without momentum": partial(torch.optim.SGD, lr=0.01),
}


@cache
def advice_for(name: str) -> Advice:
    return advise(traced(SCHEMES[name]))


def is_right(
    name: str, kind: str, change: Change, words: str = "", within: float = TOLERANCE
) -> bool:
    """Return True if a change must be predicted, which is so unless it saves almost nothing."""
    advice = advice_for(name)
    peaks = [one.peak for one in advice.hints if one.kind == kind and words in one.what]
    measured = measured_peak(SCHEMES[name], change)
    if not peaks:
        return measured >= (1 - within) * (advice.peak or 0)
    return peaks == [pytest.approx(measured, rel=within)]


@pytest.mark.parametrize("name", SCHEMES)
@pytest.mark.seed(254)
def test_every_change_is_predicted(name: str) -> None:
    assert advice_for(name).peak == pytest.approx(measured_peak(SCHEMES[name], AS_IT_IS), rel=0.02)
    assert is_right(name, "batch", Change(parts=2))
    assert is_right(name, "accumulation", Change(parts=2, accumulate=2), within=0.05)
    models = nn.ModuleDict(SCHEMES[name].models())
    # The other two are cast already, or can't be predicted.
    if name not in ("bfloat16", "recurrent") and not autocast_is_not_predicted(
        advice_for(name), models
    ):
        assert is_right(name, "precision", Change(autocast=True))
    for words, make in SGD.items():
        assert is_right(name, "optimizer", Change(make=make), words)
    for one in advice_for(name).hints:
        if one.kind == "checkpointing" and len(SCHEMES[name].models()) == 1:
            assert is_right(name, "checkpointing", Change(checkpointed=one.modules))


@pytest.mark.parametrize(
    ("name", "keeps"),
    [
        ("mixture", "Adam, which keeps 2 numbers for each parameter"),
        (
            "two over one",
            "2 optimizers that keep, for each of their parameters, Adam 2 numbers and",
        ),
        (
            "policy and value",
            "2 optimizers that keep, for each of their parameters, Adam 2 numbers",
        ),
    ],
)
def test_optimizers_are_distinguished(name: str, keeps: str) -> None:
    found = [one.what for one in advice_for(name).hints if one.kind == "optimizer"]
    assert sum(keeps in what for what in found) == 2
    assert not any("4 numbers" in what for what in found)
    eight: Any = Adam8Bit
    assert is_right(name, "optimizer", Change(make=eight), "8 bits")


def test_optimizers_of_two_kinds() -> None:
    """One optimizer keeps two values, the other keeps one: SGD with momentum replaces only the first."""
    scheme = SCHEMES["adversarial, small"]

    kinds = cycle((torch.optim.AdamW, partial(torch.optim.SGD, lr=0.01, momentum=0.9)))

    def each(parameters: Any) -> torch.optim.Optimizer:
        kind: Any = next(kinds)
        made: torch.optim.Optimizer = kind(parameters)
        return made

    momentum = SGD["SGD with momentum"]
    advice = advise(traced(scheme, Change(make=each)))
    [lighter] = [one for one in advice.hints if one.what.startswith("SGD with momentum")]
    assert "in place of AdamW, which keeps 2 numbers" in lighter.what
    assert lighter.peak == pytest.approx(measured_peak(scheme, Change(make=momentum)), rel=0.02)
    [bare] = [one for one in advice.hints if one.what.startswith("SGD without momentum")]
    assert "AdamW 2 numbers and SGD one number" in bare.what


def test_checkpointing_where_gradients_of_several_batches_are_added_up() -> None:
    """Each batch's backward pass runs only its own forward again."""
    scheme = Scheme(alone(CASES["encoder"].model), CASES["encoder"].inputs, of(squares), 8)
    four = Change(accumulate=4)
    [found] = [one for one in advise(traced(scheme, four)).hints if one.kind == "checkpointing"]
    measured = measured_peak(scheme, four._replace(checkpointed=found.modules))
    assert found.peak == pytest.approx(measured, rel=0.02)

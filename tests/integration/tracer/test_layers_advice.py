"""Advice about a session's worst traced step, against training that really makes the change."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any, TypeAlias

import pytest
import torch
from support.allocator import AllocatorTruth
from torch import Tensor, nn
from torch.nn import functional

import memlog
from memlog.journal import RunDirectory
from memlog.reports.worst_step import read_worst_step
from memlog.trace.predict import Advice, advise

pytestmark = [pytest.mark.integration, pytest.mark.usefixtures("runs")]

Make: TypeAlias = Callable[[Any], torch.optim.Optimizer]
Step: TypeAlias = Callable[[], None]
ADAM: Make = torch.optim.Adam
MOMENTUM: Make = partial(torch.optim.SGD, lr=1e-3, momentum=0.9)


def adversarial(make: Make, *, ratio: int = 1) -> Step:
    """A generator and a discriminator of images, with an optimizer each; the discriminator steps first."""
    up, norm, leaky = partial(nn.ConvTranspose2d, kernel_size=4), nn.BatchNorm2d, nn.LeakyReLU
    maker = nn.Sequential(
        *(up(64, 64), norm(64), nn.ReLU()),
        *(up(64, 32, stride=2, padding=1), norm(32), nn.ReLU()),
        *(up(32, 3, stride=2, padding=1), nn.Tanh()),
    )
    down = partial(nn.Conv2d, kernel_size=4, stride=2, padding=1)
    judge = nn.Sequential(
        *(down(3, 32), leaky(0.2), down(32, 64), norm(64), leaky(0.2)),
        *(nn.Conv2d(64, 1, 4), nn.Flatten()),
    )
    of_maker, of_judge = make(maker.parameters()), make(judge.parameters())
    real = torch.randn(64, 3, 16, 16)

    def judged(images: Tensor, *, real: bool) -> Tensor:
        out = judge(images)
        return functional.binary_cross_entropy_with_logits(out, torch.full_like(out, float(real)))

    def made() -> Tensor:
        out: Tensor = maker(torch.randn(64, 64, 1, 1))
        return out

    def step() -> None:
        for _ in range(ratio):
            of_judge.zero_grad()
            (judged(real, real=True) + judged(made().detach(), real=False)).backward()
            of_judge.step()
        of_maker.zero_grad()
        judged(made(), real=True).backward()
        of_maker.step()

    return step


def network() -> nn.Module:
    return nn.Sequential(nn.Linear(64, 512), nn.ReLU(), nn.Linear(512, 512), nn.ReLU())


def trained_by(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    optimizer.zero_grad()
    model(torch.ones(32, 64)).square().mean().backward()
    optimizer.step()


def two_over_one(make: Make) -> Step:
    model = network()
    optimizers = [make(model.parameters()) for _ in range(2)]

    def step() -> None:
        for optimizer in optimizers:
            trained_by(model, optimizer)

    return step


def advice_on(training: Step, steps: int = 40) -> Advice:
    session = memlog.init("local", layers=True, budget=0.5)
    for _ in range(steps):
        training()
    memlog.finish()
    assert not session.health.faults
    return advise(read_worst_step(RunDirectory(session.directory)).trace)


def needed(begin: Callable[[], Step]) -> int:
    """Return the peak of three steps, the models included, by the allocator's own events."""
    with AllocatorTruth() as allocator:
        training = begin()
        for _ in range(3):
            training()
    return allocator.result().peak


@pytest.mark.parametrize(
    "scheme",
    [adversarial, partial(adversarial, ratio=3), two_over_one],
    ids=["one to one", "three to one", "two over one"],
)
def test_sgd_with_momentum_in_place_of_all_optimizers(scheme: Callable[[Make], Step]) -> None:
    """A window that ended at the first optimizer's step would lack the other's state, 12 % of the peak."""
    advice = advice_on(scheme(ADAM))
    # The difference was 2.2 % once in several runs, on a slow machine. The reason is not known.
    assert advice.peak == pytest.approx(needed(lambda: scheme(ADAM)), rel=0.03)
    [lighter] = [one for one in advice.hints if one.what.startswith("SGD with momentum")]
    assert lighter.peak == pytest.approx(needed(lambda: scheme(MOMENTUM)), rel=0.03)
    assert "4 numbers" not in lighter.what


def test_sgd_with_momentum_that_is_used_already() -> None:
    advice = advice_on(adversarial(MOMENTUM))
    # The difference was 2.2 % once in several runs, on a slow machine. The reason is not known.
    assert advice.peak == pytest.approx(needed(lambda: adversarial(MOMENTUM)), rel=0.03)
    [batch] = [one for one in advice.hints if one.kind == "batch"]
    assert batch.peak < (advice.peak or 0)


def test_optimizers_of_two_kinds_are_distinguished_in_a_session() -> None:
    makes = iter((torch.optim.AdamW, MOMENTUM))

    def make(parameters: Any) -> torch.optim.Optimizer:
        return next(makes)(parameters)

    advice = advice_on(adversarial(make))
    [bare] = [one for one in advice.hints if one.what.startswith("SGD without momentum")]
    assert "AdamW 2 numbers" in bare.what
    assert "SGD one number" in bare.what


def test_optimizers_that_are_kept_and_used_no_more() -> None:
    model, kept = network(), list[torch.optim.Optimizer]()
    steps = 0

    def step() -> None:
        nonlocal steps
        if steps % 10 == 0:
            kept.append(ADAM(model.parameters()))
        steps += 1
        trained_by(model, kept[-1])

    advice = advice_on(step, steps=200)  # a busy machine takes longer to earn the third trace
    weights = sum(parameter.nbytes for parameter in model.parameters())
    [idle] = [one for one in advice.hints if "did not step" in one.what]
    assert idle.saved % (2 * weights) < 0.01 * weights  # each also keeps a number that counts steps
    assert idle.saved > weights
    [bare] = [one for one in advice.hints if one.what.startswith("SGD without momentum")]
    assert "in place of Adam, which keeps 2 numbers" in bare.what
    alone = ADAM(model.parameters())
    advice = advice_on(lambda: trained_by(model, alone))
    assert not any("did not step" in one.what for one in advice.hints)

"""Compares predicted savings of lighter optimizers with measured ones."""

from __future__ import annotations

from functools import cache, partial
from typing import Any

import pytest
import torch
from msgspec.structs import replace
from support.models import GPT, normed_mlp, text
from support.predictions import TOLERANCE
from support.training import CASES, Adam8Bit, Case, entropy, measured_peak, squares, traced
from torch import nn

from memlog.trace import encoding
from memlog.trace.predict import Advice, Hint, advise

pytestmark = pytest.mark.slow  # together they take too long for `make check`


OPTIMIZERS: dict[str, Any] = {
    "SGD with momentum": partial(torch.optim.SGD, lr=0.01, momentum=0.9),
    "SGD without momentum": partial(torch.optim.SGD, lr=0.01),
    "8 bits": Adam8Bit,
}


class Recommender(nn.Module):
    """A model whose last bias has one value, like Adam's counter of steps for each parameter."""

    def __init__(self) -> None:
        super().__init__()
        self.tables = nn.ModuleList(nn.Embedding(20_000, 32) for _ in range(4))
        self.top = nn.Sequential(nn.Linear(128, 64), nn.ReLU(), nn.Linear(64, 1))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        found = [table(x[:, at]) for at, table in enumerate(self.tables)]
        out: torch.Tensor = self.top(torch.cat(found, 1))
        return out


def half_frozen() -> nn.Module:
    model = nn.Sequential(*(nn.Linear(512, 512) for _ in range(4)), nn.Linear(512, 1))
    model[:3].requires_grad_(requires_grad=False)
    return model


HALF_FROZEN = Case(half_frozen, lambda size: torch.randn(size, 512), squares, 64)
TRAINED = {
    "gpt": CASES["gpt"],
    "mlp": CASES["mlp"],
    # In the next two, the optimizer's step is the peak.
    "mlp with batch norm": Case(normed_mlp, lambda size: torch.randn(size, 512), squares, 64),
    "language model": Case(
        lambda: GPT(width=256, blocks=4), lambda size: text(size, 32), entropy, 2
    ),
    # In the next two, a parameter is one number.
    "recommender": Case(Recommender, lambda size: torch.randint(20_000, (size, 4)), squares, 1024),
    "half frozen": HALF_FROZEN,
}


@cache
def advice_for(name: str) -> Advice:
    return advise(traced(TRAINED[name]))


def lighter(advice: Advice, words: str) -> Hint:
    [found] = [one for one in advice.hints if one.kind == "optimizer" and words in one.what]
    return found


@pytest.mark.parametrize("words", OPTIMIZERS)
@pytest.mark.parametrize("name", TRAINED)
@pytest.mark.seed(254)
def test_a_lighter_optimizer(name: str, words: str) -> None:
    found = lighter(advice_for(name), words)
    assert words == "8 bits" or "keeps 2 numbers for each" in found.what
    measured = measured_peak(TRAINED[name], make=OPTIMIZERS[words])
    assert found.peak == pytest.approx(measured, rel=0.01 if name in CASES else TOLERANCE)


@pytest.mark.seed(254)
def test_optimizer_state_is_found_in_a_trace_that_ends_with_the_first_step() -> None:
    """In a session, the window of a step closes before the tracer has found the layers of the state."""
    trace = traced(HALF_FROZEN, step=0)
    unsaid = b"".join(
        encoding.pack(*event)
        for event in encoding.decode(trace.events)
        if (event.kind, event.category) != (encoding.CLASSIFY, encoding.OPTIMIZER_STATE)
    )
    advice = advise(replace(trace, events=unsaid))
    for words, make in OPTIMIZERS.items():
        measured = measured_peak(HALF_FROZEN, make=make)
        assert lighter(advice, words).peak == pytest.approx(measured, rel=TOLERANCE)


@pytest.mark.parametrize(
    ("make", "numbers"),
    [
        (partial(torch.optim.Adam, amsgrad=True), 3),
        (torch.optim.NAdam, 2),
        (partial(torch.optim.RMSprop, momentum=0.9), 2),
        (torch.optim.RMSprop, 1),
    ],
)
def test_from_optimizers_of_other_kinds_to_a_lighter_one(make: Any, numbers: int) -> None:
    advice = advise(traced(HALF_FROZEN, make=make))
    found = {one.what: one for one in advice.hints if one.kind == "optimizer"}
    keeps = "one number" if numbers == 1 else f"{numbers} numbers"
    assert any(f"keeps {keeps} for each" in what for what in found)
    assert len(found) == (3 if numbers > 1 else 2)
    for what, one in found.items():
        if "8 bits" not in what or numbers > 1:  # the tests' own optimizer of 8 bits keeps two
            [other] = [optimizer for words, optimizer in OPTIMIZERS.items() if words in what]
            measured = measured_peak(HALF_FROZEN, make=other)
            assert one.peak == pytest.approx(measured, rel=TOLERANCE)


def test_state_without_whole_values_per_parameter_gives_no_optimizer_hint() -> None:
    make: Any = torch.optim.Adafactor  # keeps sums over rows and over columns
    wide = Case(lambda: nn.Linear(2, 4096), lambda size: torch.randn(size, 2), squares, 2)
    for case in (HALF_FROZEN, wide):
        advice = advise(traced(case, make=make))
        assert "optimizer" not in {one.kind for one in advice.hints}
    assert any("another optimizer would save is not predicted" in n for n in advice.notes)


def test_an_optimizer_without_state_has_no_lighter_one() -> None:
    advice = advise(traced(CASES["mlp"], make=OPTIMIZERS["SGD without momentum"]))
    assert "optimizer" not in {one.kind for one in advice.hints}
    advice = advise(traced(CASES["mlp"], make=OPTIMIZERS["SGD with momentum"]))
    kept = [one.what for one in advice.hints]
    assert any("keeps one number" in what for what in kept)
    assert not any(what.startswith("SGD with momentum") for what in kept)

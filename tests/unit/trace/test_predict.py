"""Compares predicted peaks with the allocator's peaks of training that makes the change."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from msgspec.structs import replace
from support.models import GPT, normed_mlp
from support.predictions import (
    TOLERANCE,
    advice_for,
    assert_autocast_is_predicted,
    autocast_is_not_predicted,
    hint,
    trace_of,
)
from support.training import CASES, Case, measured_peak, squares, traced
from torch import nn

from memlog import MemoryTracer
from memlog.torchside import internals
from memlog.trace.predict import advise
from memlog.trace.predict.lifetimes import SizedInterval, highest
from memlog.tracer.engines import autocast_types

pytestmark = pytest.mark.slow  # together they take too long for `make check`


@pytest.mark.parametrize("case", CASES)
def test_the_peak_that_hints_start_from_is_the_measured_one(case: str) -> None:
    assert advice_for(case).peak == trace_of(case).result.peak
    assert advice_for(case).peak == pytest.approx(measured_peak(CASES[case]), rel=0.002)


@pytest.mark.parametrize("kind", ["batch", "accumulation", "precision"])
@pytest.mark.parametrize("case", CASES)
@pytest.mark.seed(137, 166, 254)
def test_a_change_of_the_training(case: str, kind: str) -> None:
    half = CASES[case].batch // 2
    changes: dict[str, dict[str, Any]] = {
        "batch": {"batch": half},
        "accumulation": {"batch": half, "accumulate": 2},
        "precision": {"autocast": True},
    }
    if kind == "precision" and autocast_is_not_predicted(advice_for(case), CASES[case].model()):
        return
    found = hint(case, kind)
    assert found.peak == pytest.approx(measured_peak(CASES[case], **changes[kind]), rel=TOLERANCE)
    assert found.saved == (advice_for(case).peak or 0) - found.peak > 0


@pytest.mark.parametrize("batch", [200, 900])
def test_with_large_gradients_accumulation_saves_less_than_half_the_batch(batch: int) -> None:
    def model() -> nn.Module:
        return nn.Sequential(*(part for _ in range(6) for part in (nn.Linear(512, 512), nn.ReLU())))

    case = Case(model, lambda size: torch.randn(size, 512), squares, batch)
    advice = advise(traced(case))
    found = {one.kind: one.peak for one in advice.hints if one.kind in ("batch", "accumulation")}
    measured = measured_peak(case, batch=batch // 2, accumulate=2)
    if batch == 900:
        assert found["accumulation"] == pytest.approx(measured, rel=0.01)
        assert found["batch"] < 0.9 * measured
    else:
        assert "accumulation" not in found  # it would save nothing
        assert measured >= (advice.peak or 0)


WITH_BLOCKS = [
    *("gpt", "unet", "rollout", "encoder"),
    *("relu-conv-bn", "tanh-linear-dropout", "dropout-linear-relu"),
]


@pytest.mark.parametrize("case", WITH_BLOCKS)
@pytest.mark.seed(254)
def test_checkpointing_the_named_modules(case: str) -> None:
    found = hint(case, "checkpointing")
    assert all(f"`{path}`" in found.what for path in found.modules)
    measured = measured_peak(CASES[case], checkpointed=found.modules)
    assert found.peak == pytest.approx(measured, rel=0.01)
    assert measured < (advice_for(case).peak or 0)


def test_checkpointing_a_module_that_is_called_twice() -> None:
    """The backward pass reaches one call right after the other."""

    class Twice(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            first, second = nn.Conv2d(3, 16, 3, 1, 1), nn.Conv2d(16, 32, 3, 1, 1)
            pooled = (nn.MaxPool2d(2), second, nn.ReLU(), nn.AdaptiveAvgPool2d(1), nn.Flatten())
            self.net = nn.Sequential(first, nn.ReLU(), *pooled, nn.Linear(32, 16))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            out: torch.Tensor = self.net(x) - self.net(x.flip(-1))
            return out

    case = Case(Twice, lambda size: torch.randn(size, 3, 32, 32), squares, 16)
    traced(case)  # measures the convolutions' workspace once for each shape
    [found] = [one for one in advise(traced(case)).hints if one.kind == "checkpointing"]
    assert found.modules == ("net",)
    measured = measured_peak(case, checkpointed=found.modules)
    assert found.peak == pytest.approx(measured, rel=0.01)


def test_layers_whose_inputs_would_die_are_not_checkpointed_one_by_one() -> None:
    """Dropout and Tanh keep their result; if checkpointed, each keeps its input instead."""
    case = CASES["linear-dropout-tanh"]
    dropouts = ("1", "4", "7", "10", "13")
    assert measured_peak(case, checkpointed=dropouts) > 0.99 * measured_peak(case)
    for found in (one for one in advice_for("linear-dropout-tanh").hints if one.modules):
        measured = measured_peak(case, checkpointed=found.modules)
        assert found.peak == pytest.approx(measured, rel=TOLERANCE)


def test_a_module_whose_inputs_are_not_known_is_not_checkpointed() -> None:
    class ByName(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = CASES["relu-conv-bn"].model()

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            for block in self.inner:  # type: ignore[attr-defined] # it is a Sequential
                x = block(input=x) if isinstance(block, nn.Sequential) else block(x)
            return x

    advice = advise(traced(CASES["relu-conv-bn"]._replace(model=ByName)))
    assert not {"inner.1", "inner.2"} & {path for one in advice.hints for path in one.modules}


def test_the_modules_to_checkpoint_are_the_blocks_without_the_last() -> None:
    assert hint("gpt", "checkpointing").modules == ("blocks.0", "blocks.1", "blocks.2")
    assert hint("rollout", "checkpointing").modules == ("net",)


def test_a_checkpointed_module_is_no_hint() -> None:
    case = CASES["gpt"]._replace(
        model=lambda: GPT(width=96, blocks=4, checkpointing="not reentrant")
    )
    found = [one for one in advise(traced(case)).hints if one.kind == "checkpointing"]
    assert not any("blocks.0" in one.modules for one in found)


def test_leaves_have_nothing_to_drop() -> None:
    assert "checkpointing" not in {one.kind for one in advice_for("mlp").hints}


def test_autocast_that_is_on_is_no_hint() -> None:
    class Cast(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = CASES["gpt"].model()

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            with torch.autocast("cpu", dtype=torch.bfloat16):
                out: torch.Tensor = self.inner(x)
            return out.float()

    advice = advise(traced(CASES["gpt"]._replace(model=Cast)))
    assert "precision" not in {one.kind for one in advice.hints}
    assert "batch" in {one.kind for one in advice.hints}


class Placed(nn.Module):
    """Layer that adds a buffer, as positional encodings do."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(256, 256)
        self.register_buffer("places", torch.randn(256))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.tanh(self.inner(torch.tanh(self.inner(x)) + self.places))


UNKNOWN_TO_AUTOCAST: dict[str, Callable[[], nn.Module]] = {
    "Placed": Placed,
    # Its result is float32 on the CPU: the hint was 40 % too low.
    "RMSNorm": lambda: nn.Sequential(nn.Linear(256, 256), nn.RMSNorm(256), nn.ReLU()),
}


@pytest.mark.parametrize("kind", UNKNOWN_TO_AUTOCAST)
def test_unknown_types_give_no_autocast_hint(kind: str) -> None:
    case = CASES["mlp"]._replace(model=UNKNOWN_TO_AUTOCAST[kind])
    advice = advise(traced(case))
    assert "precision" not in {one.kind for one in advice.hints}
    assert any(f"autocast would save can't be predicted: {kind} " in n for n in advice.notes)


NORMS: dict[str, Callable[[], nn.Module]] = {
    "batch": lambda: nn.BatchNorm2d(16),
    "group": lambda: nn.GroupNorm(4, 16),
    "instance": lambda: nn.InstanceNorm2d(16, affine=True),
}


@pytest.mark.parametrize("norm", NORMS)
def test_bfloat16_autocast_with_norms(norm: str) -> None:
    def model() -> nn.Module:
        first, second = nn.Conv2d(2, 16, 3), nn.Conv2d(16, 16, 3)
        return nn.Sequential(first, NORMS[norm](), nn.ReLU(), second, NORMS[norm](), nn.ReLU())

    case = CASES["unet"]._replace(model=model)
    assert_autocast_is_predicted(case)


def test_without_bfloat16_convolutions_autocast_gets_no_figure(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """On a processor without AVX-512 autocast took 2.5 times what was predicted."""
    monkeypatch.setattr(internals, "onednn_has_bfloat16", lambda: False)
    autocast_types._is_slow_convolution.cache_clear()
    try:
        advice = advise(traced(CASES["relu-conv-bn"]))
        assert autocast_is_not_predicted(advice, CASES["relu-conv-bn"].model())
        products = advise(traced(CASES["mlp"]))
    finally:
        autocast_types._is_slow_convolution.cache_clear()
    assert "precision" in {one.kind for one in products.hints}


def test_a_note_warns_of_batch_norm_in_a_checkpointed_module() -> None:
    case = Case(normed_mlp, lambda size: torch.randn(size, 512), squares, 4096)
    advice = advise(traced(case))
    [found] = [one for one in advice.hints if one.kind == "checkpointing"]
    assert set(found.modules) <= {"0", "1", "2", "3", "4", "5"}
    [note] = [note for note in advice.notes if "update its running statistics" in note]
    assert "`0.1`" in note


def test_bare_norms_are_not_checkpointed() -> None:
    def model() -> nn.Module:
        parts = ((nn.Linear(64, 64), nn.BatchNorm1d(64), nn.Tanh()) for _ in range(4))
        return nn.Sequential(*(one for part in parts for one in part))

    advice = advise(traced(Case(model, lambda size: torch.randn(size, 64), squares, 4096)))
    named = {module for one in advice.hints for module in one.modules}
    assert not named & {"1", "4", "7", "10"}
    assert not any("running statistics" in note for note in advice.notes)


def test_the_first_step_predicts_a_later_steps_peak() -> None:
    first = advise(traced(CASES["gpt"], step=0))
    assert first.peak == pytest.approx(advice_for("gpt").peak, rel=0.001)
    assert first.traced_peak < (first.peak or 0)
    assert any("was the first" in note for note in first.notes)
    assert {one.kind for one in first.hints} == {one.kind for one in advice_for("gpt").hints}


def test_a_note_warns_of_a_missing_backward_pass() -> None:
    case = CASES["gpt"]
    model, tracer = case.model(), MemoryTracer()
    with tracer.trace(model):
        case.loss(model(case.inputs(case.batch)))  # and then there was no memory left
    advice = advise(tracer.recording)
    assert any("did not reach its backward pass" in note for note in advice.notes)
    assert not {"checkpointing", "accumulation"} & {one.kind for one in advice.hints}


def test_an_incomplete_trace_predicts_nothing() -> None:
    trace = trace_of("gpt")
    cut = replace(trace, result=replace(trace.result, truncated=True, kept_events=10))
    sampled = replace(trace, result=replace(trace.result, exactness="sampled"))
    for advice in (advise(cut), advise(sampled)):
        assert advice.peak is None
        assert advice.hints == ()
        assert "nothing can be predicted" in advice.notes[0]
        assert advice.categories == advice_for("gpt").categories


def test_the_largest_categories_and_layers_are_named() -> None:
    advice = advice_for("gpt")
    assert next(iter(advice.categories)) == "activations"
    assert sum(advice.categories.values()) == advice.traced_peak
    assert advice.layers[0].at_peak >= advice.layers[-1].at_peak > 0
    assert any(".mlp.0" in layer.path for layer in advice.layers)


def test_levels_and_spikes() -> None:
    intervals = [SizedInterval(-1, 10, 5), SizedInterval(2, 4, 10), SizedInterval(4, 6, 20)]
    # At moment 4 the second interval ends before the third one begins.
    assert highest(intervals, 10) == 25
    assert highest(intervals, 10, [(8, 30)]) == 35
    assert highest([], 0) == 0

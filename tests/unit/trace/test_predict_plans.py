"""Plans for traced steps, against the allocator's peaks of training that really makes their changes."""

# PyTorch leaves some of these without types.
# mypy: allow-untyped-calls

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from typing import Any

import pytest
import torch
from msgspec.structs import replace
from support.models import ResidualNetwork, normed_mlp
from support.predictions import hint
from support.training import CASES, Case, applied, squares, traced
from torch import Tensor, nn
from torch.nn import functional

from memlog import MemoryTracer
from memlog.torchside import internals
from memlog.trace.predict import advise
from memlog.trace.predict.fitting import (
    MOMENTUM,
    NO_STATE,
    Choices,
    FittingPlan,
    PlannedChanges,
    PlanSearch,
)
from memlog.trace.predict.plan import BesidesTensors, StepPredictor, plan_for_trace
from memlog.trace.records import RecordedTrace
from memlog.tracer.engines import autocast_types

pytestmark = pytest.mark.slow  # together they take too long for `make check`
NOTHING = BesidesTensors(0, "", "")


class Recurrent(nn.Module):
    def __init__(self, cells: nn.RNNBase) -> None:
        super().__init__()
        self.cells = cells
        width = cells.proj_size or cells.hidden_size
        self.head = nn.Linear(width * (1 + cells.bidirectional), 8)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.head(self.cells(x)[0])
        return out


class Mixed(nn.Module):
    """Residual blocks of norms and products, as in MLP-Mixer."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(32, 64)
        self.blocks = nn.ModuleList(
            nn.Sequential(nn.LayerNorm(64), nn.Linear(64, 256), nn.GELU(), nn.Linear(256, 64))
            for _ in range(3)
        )

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x)
        for block in self.blocks:
            x = x + block(x)
        return x


MODELS = {
    **{name: CASES[name] for name in ("gpt", "encoder", "unet", "rollout", "relu-conv-bn")},
    "layers": CASES["tanh-linear-dropout"],
    "norms": Case(normed_mlp, lambda batch: torch.randn(batch, 512), squares, 1024),
    "recurrent": Case(
        lambda: Recurrent(nn.GRU(32, 64, 2, batch_first=True)),
        lambda batch: torch.randn(batch, 32, 32),
        squares,
        16,
    ),
    "mixed": Case(Mixed, lambda batch: torch.randn(batch, 16, 32), squares, 32),
    "residual": Case(
        lambda: ResidualNetwork(8), lambda batch: torch.randn(batch, 3, 64, 64), squares, 16
    ),
}


@cache
def trace_of_model(name: str) -> RecordedTrace:
    traced(MODELS[name])  # what a convolution takes inside is measured once for each shape
    return traced(MODELS[name])


def planned(name: str, memory: int) -> FittingPlan:
    found = plan_for_trace(trace_of_model(name), memory, NOTHING, MODELS[name].batch)
    assert isinstance(found, FittingPlan)
    return found


@pytest.mark.parametrize("share", [0.6, 0.2])
@pytest.mark.parametrize("name", MODELS)
def test_a_plan_that_is_applied_fits_and_takes_what_it_says(name: str, share: float) -> None:
    """``share``: how much of what all changes together save may stay."""
    whole = planned(name, 2**40).steps[0].needed
    least = planned(name, 1).steps[-1].needed
    memory = round(least + share * (whole - least))
    plan = planned(name, memory)
    assert plan.fits
    assert [step.fits for step in plan.steps] == [False] * (len(plan.steps) - 1) + [True]
    measured = applied(MODELS[name], plan)
    assert plan.steps[-1].peak == pytest.approx(measured, rel=0.05)
    assert measured <= memory


@pytest.mark.parametrize(
    "changes",
    [
        PlannedChanges(parts=4, checkpointed=("blocks.0", "blocks.1", "blocks.2")),
        PlannedChanges(parts=2, checkpointed=("blocks.0", "blocks.2"), optimizer=NO_STATE),
        PlannedChanges(autocast=True, checkpointed=("blocks.0", "blocks.1"), optimizer=MOMENTUM),
        PlannedChanges(parts=4, autocast=True, checkpointed=("blocks.0", "blocks.1", "blocks.2")),
    ],
    ids=str,
)
@pytest.mark.parametrize("name", ["gpt", "mixed"])
def test_changes_are_predicted_together(name: str, changes: PlannedChanges) -> None:
    found = StepPredictor(trace_of_model(name)).peak_with(changes)
    assert found == pytest.approx(applied(MODELS[name], changes), rel=0.05)


CELLS: dict[str, tuple[Callable[..., nn.RNNBase], tuple[int, ...], dict[str, Any]]] = {
    "lstm": (nn.LSTM, (32, 256, 1), {}),
    "rows that are no multiple of 16": (nn.LSTM, (100, 200, 2), {"dropout": 0.3}),
    "no biases": (nn.LSTM, (100, 200, 2), {"bias": False}),
    "two directions": (nn.LSTM, (64, 192, 2), {"bidirectional": True}),
    "one input": (nn.LSTM, (1, 128, 2), {}),
    "projections": (nn.LSTM, (32, 128, 1), {"proj_size": 32}),
    "gru": (nn.GRU, (32, 128, 2), {}),
    "rnn": (nn.RNN, (32, 128, 2), {}),
}


@pytest.mark.filterwarnings("ignore:LSTM with projections")
@pytest.mark.parametrize("parts", [2, 8])
@pytest.mark.parametrize("name", CELLS)
def test_parts_of_a_batch_of_sequences(name: str, parts: int) -> None:
    """Copies of an LSTM's weights do not shrink with the batch."""
    kind, sizes, options = CELLS[name]
    case = Case(
        lambda: Recurrent(kind(*sizes, batch_first=True, **options)),
        lambda batch: torch.randn(batch, 16, sizes[0]),
        squares,
        16,
    )
    traced(case)
    found = StepPredictor(traced(case)).peak_with(PlannedChanges(parts=parts))
    assert found == pytest.approx(applied(case, PlannedChanges(parts=parts)), rel=0.015)


class Translation(nn.Module):
    """A recurrent layer that begins with another one's last state."""

    def __init__(self) -> None:
        super().__init__()
        self.source, self.target = (nn.GRU(64, 64, batch_first=True) for _ in range(2))
        self.attention = nn.MultiheadAttention(64, 4, batch_first=True)

    def forward(self, x: Tensor) -> Tensor:
        source, last = self.source(x)
        target, _ = self.target(x.flip(1), last)
        out: Tensor = self.attention(target, source, source, need_weights=False)[0]
        return out


def test_a_checkpointed_module_whose_last_state_another_one_frees() -> None:
    case = Case(Translation, lambda batch: torch.randn(batch, 24, 64), squares, 32)
    changes = PlannedChanges(checkpointed=("source", "target"))
    found = StepPredictor(traced(case)).peak_with(changes)
    assert found == pytest.approx(applied(case, changes), rel=0.01)


class Attention(nn.Module):
    def __init__(self, width: int = 64) -> None:
        super().__init__()
        self.norm, self.both = nn.LayerNorm(width), nn.Linear(width, 3 * width)
        self.out, self.up = nn.Linear(width, width), nn.Linear(width, 4 * width)
        self.down = nn.Linear(4 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        batch, length, width = x.shape
        split = (
            each.view(batch, length, 4, -1).transpose(1, 2)
            for each in self.both(self.norm(x)).chunk(3, -1)
        )
        found = functional.scaled_dot_product_attention(*split, dropout_p=0.1)
        x = x + self.out(found.transpose(1, 2).reshape(batch, length, width))
        out: Tensor = x + self.down(functional.gelu(self.up(x)))
        return out


def test_autocast_with_checkpoints_around_attention_with_dropout() -> None:
    """Gradients that leave the attention, which computes in float32, are cast back."""
    case = Case(
        lambda: nn.Sequential(*(Attention() for _ in range(3)), nn.Linear(64, 10)),
        lambda batch: torch.randn(batch, 48, 64),
        squares,
        16,
    )
    changes = PlannedChanges(autocast=True, checkpointed=("0", "1", "2"))
    found = StepPredictor(traced(case)).peak_with(changes)
    assert found == pytest.approx(applied(case, changes), rel=0.05)


def test_a_change_alone_is_what_a_hint_says() -> None:
    predictor = StepPredictor(trace_of_model("gpt"))
    alone = PlannedChanges(checkpointed=hint("gpt", "checkpointing").modules)
    assert predictor.peak_with(alone) == hint("gpt", "checkpointing").peak
    assert predictor.peak_with(PlannedChanges(autocast=True)) == hint("gpt", "precision").peak
    momentum = hint("gpt", "optimizer", "SGD with momentum")
    assert predictor.peak_with(PlannedChanges(optimizer=MOMENTUM)) == momentum.peak


def test_an_optimizer_of_8_bits_keeps_two_numbers_in_place_of_three() -> None:
    trace = traced(CASES["mlp"], make=lambda parameters: torch.optim.Adam(parameters, amsgrad=True))
    [said] = [one.peak for one in advise(trace).hints if "8 bits a number" in one.what]
    changes = PlannedChanges(optimizer="bitsandbytes.optim.Adam8bit()")
    assert StepPredictor(trace).peak_with(changes) == said


def test_a_lighter_optimizer_is_the_last_resort() -> None:
    least = planned("gpt", 1)
    assert not least.fits
    assert not least.code
    assert "does not fit with all these changes" in least.text()
    without = min(
        peak
        for parts in (1, 2, 4, 8, 16)
        for modules in ((), StepPredictor(trace_of_model("gpt")).modules)
        for cast in (False, True)
        if (peak := _with("gpt", parts=parts, checkpointed=modules, autocast=cast)) is not None
    )
    assert planned("gpt", round(1.03 * without)).optimizer == ""
    last = planned("gpt", round(0.97 * without))
    assert last.optimizer
    assert "Another optimizer changes the training" in last.text()
    assert "optimizer = torch.optim.SGD(model.parameters(), lr=..., momentum=" in last.code


def _with(name: str, *, parts: int, checkpointed: tuple[str, ...], autocast: bool) -> int | None:
    changes = PlannedChanges(parts=parts, checkpointed=checkpointed, autocast=autocast)
    return StepPredictor(trace_of_model(name)).peak_with(changes)


def test_parts_divide_the_batch() -> None:
    trace = trace_of_model("gpt")
    changes = PlannedChanges(parts=3)
    memory = round(1.03 * (StepPredictor(trace).peak_with(changes) or 0))
    of_30 = plan_for_trace(trace, memory, NOTHING, 30)
    assert isinstance(of_30, FittingPlan)
    assert of_30.parts == 3
    assert of_30.steps[-1].change == "+ gradient accumulation: 3 parts of 10"
    unknown = plan_for_trace(trace, memory, NOTHING)
    assert isinstance(unknown, FittingPlan)
    assert unknown.parts == 4
    assert "This assumes that the batch can be divided into 4 equal parts." in unknown.text()
    assert "for part in batch.chunk(4):" in unknown.code


def test_the_time_of_checkpointing_is_that_of_the_forward_passes() -> None:
    plan = plan_for_trace(trace_of_model("gpt"), 2**24, NOTHING, batch=1)  # can't be divided
    assert isinstance(plan, FittingPlan)
    assert plan.checkpointed
    [note] = [one for one in plan.notes() if one.startswith("The second forward")]
    assert f"{plan.time:.0%}" in note
    assert plan.operations is None


def test_memory_beside_tensors_counts() -> None:
    besides = BesidesTensors(2**30, "the context", "NCCL's buffers")
    plan = plan_for_trace(trace_of_model("gpt"), 2**29, besides)
    assert isinstance(plan, FittingPlan)
    assert not plan.fits
    assert plan.steps[0].needed == plan.steps[0].peak + 2**30
    assert "Not counted: NCCL's buffers." in plan.text()


def test_what_can_not_be_predicted_has_no_plan() -> None:
    trace = trace_of_model("gpt")
    cut = replace(trace, result=replace(trace.result, truncated=True, kept_events=10))
    assert "nothing can be predicted" in str(plan_for_trace(cut, 2**30, NOTHING))
    case = CASES["gpt"]
    model, tracer = case.model(), MemoryTracer()
    with tracer.trace(model):
        case.loss(model(case.inputs(case.batch)))
    assert "no backward pass" in str(plan_for_trace(tracer.recording, 2**30, NOTHING))


class Made:
    """Memory that does not fall with every change."""

    def __init__(self, peak: int) -> None:
        self.peak = self.needed = peak

    def fits(self, memory: int) -> bool:
        return self.needed <= memory


def test_changes_that_need_more_are_left_out() -> None:
    """Autocast's copies and accumulated gradients can be larger than what they save."""

    def ask(changes: PlannedChanges) -> Made:
        peak = 100 - 40 * bool(changes.checkpointed) + 50 * changes.autocast
        return Made(peak + 30 * (changes.parts > 1))

    choices = Choices(PlannedChanges(), [1, 2, 4], ("a",), {"autocast": (False, True)})

    def found(memory: int) -> tuple[PlannedChanges, bool]:
        return PlanSearch(ask, choices, memory).cheapest()

    assert found(60) == (PlannedChanges(checkpointed=("a",)), True)
    assert found(50) == (PlannedChanges(checkpointed=("a",)), False)


def test_no_autocast_of_convolutions_on_the_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    # As on a processor that has instructions for convolutions in bfloat16.
    monkeypatch.setattr(internals, "onednn_has_bfloat16", lambda: True)
    autocast_types._is_slow_convolution.cache_clear()
    trace = traced(MODELS["relu-conv-bn"])
    autocast_types._is_slow_convolution.cache_clear()
    assert StepPredictor(trace).peak_with(PlannedChanges(autocast=True)) is not None
    plan = plan_for_trace(trace, 1, NOTHING, batch=1)
    assert isinstance(plan, FittingPlan)
    assert not plan.autocast
    assert any("oneDNN computes convolutions in bfloat16" in remark for remark in plan.remarks)

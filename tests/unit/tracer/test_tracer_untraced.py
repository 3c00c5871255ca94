"""Traced peaks against those of steps that are not traced: tracing must not change what it measures."""

from __future__ import annotations

from contextlib import nullcontext

import pytest
import torch
from support.allocator import AllocatorTruth
from support.untraced import EXACT, INEXACT, Case

from memlog import MemoryTracer
from memlog.trace.records import TraceResult
from memlog.tracer.engines.patches import unshared_reference_count

pytestmark = pytest.mark.filterwarnings("ignore")  # of torch's, about one model or another

TOLERANCE = 0.005


def traced_and_true(case: Case) -> tuple[TraceResult, int]:
    """The trace of a step, and the peak of the next by the allocator's events."""
    torch.manual_seed(0)
    model, step = case()
    tracer = MemoryTracer()
    step()
    for _ in range(2):  # what operations take inside is measured in the first
        with tracer.trace(model):
            step()
    with AllocatorTruth() as allocator:
        step()
    assert not tracer.health.faults
    return tracer.result, allocator.result().peak


@pytest.mark.parametrize("name", EXACT)
def test_an_exact_peak_is_the_untraced_steps(name: str) -> None:
    result, peak = traced_and_true(EXACT[name])
    assert result.exactness == "exact"
    assert result.peak - result.before == pytest.approx(peak, rel=TOLERANCE)


@pytest.mark.parametrize("name", INEXACT)
def test_what_is_not_the_untraced_steps_is_not_called_exact(name: str) -> None:
    case, exactness = INEXACT[name]
    result, _ = traced_and_true(case)
    assert result.exactness == exactness


def test_the_sentence_names_the_derivative() -> None:
    result, _ = traced_and_true(INEXACT["products"][0])
    assert any("ProdBackward1" in sentence for sentence in result.unseen)


def test_what_the_program_adds_is_distinguished_from_what_torch_adds() -> None:
    assert unshared_reference_count() > 0
    model = torch.nn.Linear(64, 64, bias=False)
    batch, bias = torch.randn(64, 64), torch.zeros(64)
    tracer = MemoryTracer()
    with torch.no_grad(), tracer.trace(model):
        product = model(batch)
        product = product + bias
    result = tracer.result
    assert result.peak - result.before == 2 * product.nbytes


def test_no_bit_of_a_gradient_changes() -> None:
    """A dispatch mode changes the last bits of these derivatives."""

    def gradients(tracer: MemoryTracer | None) -> list[torch.Tensor]:
        torch.manual_seed(0)
        model = torch.nn.Linear(64, 512)
        value = torch.randn((), requires_grad=True)
        with nullcontext() if tracer is None else tracer.trace(model):
            out = model(torch.randn(256, 64))
            filled = out.masked_fill(out > 0, value).cos() + out.clone().masked_fill_(
                out < -1, value
            )
            loss = filled.sum() + out[:8, :4].round().prod(1).sum() + out[:3, :3].round().prod()
            loss.backward()
        assert value.grad is not None
        assert model.weight.grad is not None
        return [value.grad, model.weight.grad]

    tracer = MemoryTracer()
    for one, other in zip(gradients(None), gradients(tracer), strict=True):
        assert torch.equal(one, other)
    assert not tracer.health.faults
    assert tracer.result.exactness == "lower bound"


def test_parameters_can_be_swapped_in_a_trace() -> None:
    torch.__future__.set_swap_module_params_on_conversion(True)
    try:
        model = torch.nn.Sequential(torch.nn.Linear(8, 8), torch.nn.ReLU(), torch.nn.Linear(8, 2))
        tracer = MemoryTracer()
        with tracer.trace(model):
            model(torch.randn(4, 8)).sum().backward()
            model.zero_grad()
            model.double()
            model(torch.randn(4, 8, dtype=torch.double)).sum().backward()
    finally:
        torch.__future__.set_swap_module_params_on_conversion(False)
    assert not tracer.health.faults
    assert tracer.result.exactness == "exact"

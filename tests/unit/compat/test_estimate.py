"""The estimated memory of a training step compared with the measured memory."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from support.training import CASES, measured_peak, traced
from torch import Tensor, nn

from memlog import ConfigurationError
from memlog.compat.gpu_memory_profiler import MemoryEstimate, estimate_memory


def estimate(name: str, **changed: Any) -> MemoryEstimate:
    case = CASES[name]
    batch = changed.pop("batch", case.batch)
    return estimate_memory(case.model(), lambda m: case.loss(m(case.inputs(batch))), **changed)


@pytest.mark.parametrize("case", ["gpt", "mlp", "encoder"])
@pytest.mark.slow
def test_the_estimated_peak_is_that_of_real_training(case: str) -> None:
    assert estimate(case).peak == pytest.approx(measured_peak(CASES[case]), rel=0.01)


@pytest.mark.parametrize("case", ["unet", "rollout"])
@pytest.mark.slow
def test_what_convolutions_need_inside_themselves_is_not_in_an_estimate(case: str) -> None:
    estimated, measured = estimate(case), measured_peak(CASES[case])
    assert 0.75 * measured < estimated.peak < measured
    # An estimate does not change the known workspaces of real operations.
    assert traced(CASES[case]).result.peak == pytest.approx(measured, rel=0.002)


def test_weights_gradients_and_state_are_counted() -> None:
    found = estimate("mlp")
    weights = sum(p.nbytes for p in CASES["mlp"].model().parameters())
    tensors = 2 * len(list(CASES["mlp"].model().parameters()))
    assert found.parameters == found.gradients == weights
    assert 0 <= found.optimizer_state - 2 * weights <= 4 * tensors  # and a counter for each
    assert found.data == CASES["mlp"].inputs(CASES["mlp"].batch).nbytes
    resting = found.parameters + found.buffers + found.optimizer_state
    assert found.after_data == resting + found.data
    assert found.after_forward == found.after_data + found.activations
    assert found.after_forward < found.peak


@pytest.mark.seed(119, 120)
@pytest.mark.slow
def test_half_the_batch_halves_data_and_activations_alone() -> None:
    whole, half = estimate("gpt"), estimate("gpt", batch=CASES["gpt"].batch // 2)
    assert half.activations == pytest.approx(whole.activations / 2, rel=0.001)
    assert half.parameters == whole.parameters
    added_up = estimate("gpt", batch=CASES["gpt"].batch // 2, accumulate=2)
    assert half.peak <= added_up.peak < 0.65 * whole.peak


def test_a_lighter_optimizer_has_no_state() -> None:
    found = estimate("mlp", optimizer=lambda p: torch.optim.SGD(p, lr=0.1))
    assert found.optimizer_state == 0


def test_nothing_is_computed_and_nothing_held() -> None:
    """The model has a terabyte of activations. Its weights have no storage."""
    model = nn.Sequential(*(nn.Linear(100_000, 100_000, device="meta") for _ in range(4)))
    found = estimate_memory(model, lambda m: m(torch.randn(1_000_000, 100_000)).square().mean())
    assert found.parameters == 4 * 4 * (100_000**2 + 100_000)
    assert found.activations > 10**12
    assert all(parameter.is_meta for parameter in model.parameters())


def test_the_model_stays_as_it_is() -> None:
    model = CASES["unet"].model()
    before = {name: value.clone() for name, value in model.state_dict().items()}
    estimate_memory(model, lambda m: m(torch.randn(2, 2, 32, 32)).square().mean())
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())
    assert all(parameter.grad is None for parameter in model.parameters())


def test_a_loss_that_reads_values_is_one_clear_error() -> None:
    def loss(model: nn.Module) -> Tensor:
        out: Tensor = model(torch.randn(4, 256)).mean()
        return out if out.item() > 0 else -out

    with pytest.raises(ConfigurationError, match="decides by a tensor's value"):
        estimate_memory(CASES["mlp"].model(), loss)


def test_the_text_of_an_estimate() -> None:
    lines = estimate("mlp").text().splitlines()
    assert lines[0].split() == ["Model", "weights:", "1.5", "MiB"]
    assert lines[-1].startswith("  Peak: ")

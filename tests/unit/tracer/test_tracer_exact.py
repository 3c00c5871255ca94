"""Traces compared with the allocator's own figures and with computed sizes."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

import pytest
import torch
from support.allocator import AllocatorTruth
from support.models import GPT, UNet, mlp, text
from support.training import entropy, squares
from torch import Tensor, nn

from memlog import MemoryTracer

TOLERANCE = 0.002


def gpt(checkpointing: str | None = None) -> nn.Module:
    return GPT(width=96, blocks=4, checkpointing=checkpointing)


CASES: dict[
    str, tuple[Callable[[], nn.Module], Callable[[], Tensor], Callable[[Tensor], Tensor]]
] = {
    "mlp": (mlp, lambda: torch.randn(256, 64), squares),
    "gpt": (gpt, lambda: text(16, 64), entropy),
    "gpt, reentrant": (lambda: gpt("reentrant"), lambda: text(16, 64), entropy),
    "gpt, not reentrant": (lambda: gpt("not reentrant"), lambda: text(16, 64), entropy),
    "unet": (UNet, lambda: torch.randn(4, 2, 32, 32), squares),
}


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("step", ["first", "second"])
@pytest.mark.seed(193, 250)
def test_the_trace_is_the_allocators_own(case: str, step: str) -> None:
    make, inputs, loss_of = CASES[case]
    torch.manual_seed(0)
    model, batch = make(), inputs()
    optimizer = torch.optim.AdamW(model.parameters())
    tracer = MemoryTracer()

    def train() -> None:
        loss_of(model(batch)).backward()
        optimizer.step()
        optimizer.zero_grad()

    if step == "second":
        train()
    # The scratch space of convolutions is measured with a profiler, and there can only be one at a time: so
    # it is measured before the truth is.
    with tracer.trace(make()) as warm:
        loss_of(make()(batch)).backward()
    assert not warm.result.dropped

    with AllocatorTruth() as allocator, tracer.trace(model):
        train()

    truth, result = allocator.result(), tracer.result
    assert result.exactness == "exact"
    assert result.peak - result.before == pytest.approx(truth.peak, rel=TOLERANCE)
    assert result.end - result.before == truth.end
    assert sum(share.size for share in result.shares) == result.peak
    assert result.attributed >= 0.9
    assert not tracer.health.faults


def test_known_sizes_have_their_categories() -> None:
    model = nn.Sequential(
        nn.Linear(100, 200, bias=False), nn.Tanh(), nn.Linear(200, 50, bias=False)
    )
    weights = 4 * (100 * 200 + 200 * 50)
    batch = torch.randn(16, 100)
    optimizer = torch.optim.Adam(model.parameters())
    tracer = MemoryTracer()
    with tracer.trace(model):
        model(batch).sum().backward()
        optimizer.step()

    categories = tracer.result.categories
    assert categories["parameters"] == weights
    assert categories["gradients"] == weights
    assert categories["inputs"] == batch.nbytes
    # Two moments and a step count of 4 bytes for each of the two parameters.
    assert categories["optimizer state"] == 2 * weights + 2 * 4

    first = tracer.get_layer_figures("0")
    assert first.at_peak >= 4 * 4 * 100 * 200
    forward = first.phase("forward")
    assert (forward.calls, forward.allocated, forward.kept) == (1, 16 * 200 * 4, 16 * 200 * 4)


def test_what_a_layer_returns_is_an_activation() -> None:
    model = nn.Sequential(nn.Linear(32, 64), nn.Sigmoid(), nn.Linear(64, 32))
    batch = torch.randn(8, 32)
    tracer = MemoryTracer()
    with tracer.trace(model):
        out = model(batch)

    result: Any = tracer.result
    # At the peak the first layer's result is still there, which nothing needs after the second.
    assert result.categories["activations"] == 4 * 8 * (64 + 64)
    assert result.end - result.before == 4 * 8 * 64 + out.nbytes


def test_the_optimizers_state_belongs_to_the_parameters_module() -> None:
    model = nn.Sequential(nn.Linear(10, 1000, bias=False), nn.Linear(1000, 1, bias=False))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)

    def train() -> None:
        model(torch.ones(1, 10)).sum().backward()
        optimizer.step()

    tracer = MemoryTracer()
    train()  # the state is there before the trace and seen when the optimizer steps
    with tracer.trace(model):
        train()

    assert state_by_path(tracer) == {"0": 40_000, "1": 4000}


def test_state_of_all_parameters_belongs_to_the_model() -> None:
    model = nn.Sequential(nn.Linear(16, 32), nn.Tanh(), nn.Linear(32, 64))
    optimizer = torch.optim.LBFGS(model.parameters(), max_iter=4, history_size=5)

    def closure() -> Tensor:
        optimizer.zero_grad()
        loss = squares(model(torch.ones(4, 16)))
        loss.backward()
        return loss

    tracer = MemoryTracer()
    optimizer.step(closure)
    with tracer.trace(model):
        optimizer.step(closure)

    held = state_by_path(tracer)
    assert set(held) == {"Sequential"}
    numbers = sum(parameter.numel() for parameter in model.parameters())
    assert held["Sequential"] >= 2 * 4 * numbers  # the direction and the gradients, all in one


def test_state_of_the_one_parameter_that_was_trained_stays_with_it() -> None:
    model = nn.Sequential(nn.Linear(10, 20, bias=False), nn.Linear(20, 30, bias=False))
    optimizer = torch.optim.Adam(model.parameters())
    tracer = MemoryTracer()
    with tracer.trace(model):
        model[1](torch.ones(1, 20)).sum().backward()
        optimizer.step()
        model(torch.ones(5000, 10))  # the peak

    assert state_by_path(tracer) == {"1": 2 * 4 * 20 * 30 + 4}


def state_by_path(tracer: MemoryTracer) -> dict[str, int]:
    return {
        share.path: share.size
        for share in tracer.result.shares
        if share.category == "optimizer state"
    }


def held_by(sparse: Any) -> int:
    return int(
        sparse._indices().untyped_storage().nbytes() + sparse._values().untyped_storage().nbytes()
    )


def test_sparse_gradients_that_accumulate_are_the_allocators() -> None:
    model = nn.Embedding(1000, 64, sparse=True)
    words = torch.arange(200)
    tracer = MemoryTracer()
    with AllocatorTruth() as allocator, tracer.trace(model):
        for _ in range(3):  # the second and third are added in place
            model(words).sum().backward()

    truth, result = allocator.result(), tracer.result
    assert result.end - result.before == truth.end == 3 * 200 * (64 * 4 + 8)
    assert result.peak - result.before == pytest.approx(truth.peak, rel=TOLERANCE)
    assert result.exactness == "lower bound"
    assert not tracer.health.faults


def test_tokens_stay_inputs_though_a_sparse_gradient_holds_them() -> None:
    model = nn.Sequential(nn.Embedding(1000, 64, sparse=True), nn.Linear(64, 64))
    words = torch.arange(200)
    tracer = MemoryTracer()
    with tracer.trace(model):
        model(words).sum().backward()
    assert tracer.result.categories["inputs"] == words.nbytes


@pytest.mark.parametrize("change", ["add", "scale", "empty", "put"])
def test_a_sparse_tensor_from_before_is_followed_where_it_is_written_to(change: str) -> None:
    model = nn.Linear(8, 8)

    def made() -> Tensor:
        indices = torch.arange(500).repeat(2, 1)
        return torch.sparse_coo_tensor(indices, torch.ones(500), check_invariants=False)

    sparse, more = made(), made()
    tracer = MemoryTracer()
    before = held_by(sparse)
    with tracer.trace(model):
        if change == "add":
            sparse.add_(more)
        elif change == "scale":
            sparse.mul_(2.0)
        elif change == "empty":
            sparse.zero_()
        else:
            torch.add(more, more, out=sparse)
    result = tracer.result
    assert result.before == 4 * 72 + before
    assert result.end - result.before == held_by(sparse) - before
    assert result.exactness == "lower bound"
    assert not tracer.health.faults


def test_an_out_buffer_is_no_new_storage() -> None:
    square, buffer, empty = torch.randn(128, 128), torch.empty(128, 128), torch.empty(0)
    foreign = torch.from_numpy(torch.empty(128, 128).numpy())
    model = nn.Linear(8, 8)
    tracer = MemoryTracer()
    with tracer.trace(model):
        torch.mm(square, square, out=torch.empty(128, 128))  # measured before the truth is
    with AllocatorTruth() as allocator, tracer.trace(model):
        torch.mm(square, square, out=buffer)
        torch.mm(square, square, out=empty)
        torch.mm(square, square, out=foreign)
    truth, result = allocator.result(), tracer.result
    assert result.before == 4 * 72 + buffer.nbytes  # numpy's memory is not torch's
    assert result.end - result.before == truth.end == empty.nbytes
    assert not tracer.health.faults


def test_measuring_scratch_space_leaves_the_users_profiler_alone() -> None:
    convolution = nn.Conv2d(3, 16, 5, padding=2)
    tracer = MemoryTracer()
    with torch.profiler.profile() as profile, tracer.trace(convolution):
        convolution(torch.randn(3, 3, 21, 23))

    assert "aten::conv2d" in {event.key for event in profile.key_averages()}
    assert tracer.result.dropped == {"operations whose scratch space could not be measured": 1}
    assert tracer.result.exactness == "lower bound"
    assert any("aten.convolution.default" in sentence for sentence in tracer.result.unseen)


def test_the_peak_of_nothing_is_what_was_there() -> None:
    model = nn.Linear(10, 10)
    tracer = MemoryTracer()
    with tracer.trace(model):
        pass
    result: Any = tracer.result
    assert result.peak == result.before == result.end == 4 * 110
    assert result.categories == {"parameters": 440}


@pytest.mark.parametrize("named", [True, False])
def test_peaks_are_lower_bounds_if_another_thread_calls_the_model(named: bool) -> None:
    net = torch.nn.Sequential(torch.nn.Linear(64, 64))

    def exactness(called: torch.nn.Module) -> str:
        tracer = MemoryTracer()
        with tracer.trace(net if named else None):
            if called is not net:
                net(torch.ones(8, 64))
            thread = threading.Thread(target=called, args=(torch.ones(8, 64),))
            thread.start()
            thread.join()
        return tracer.result.exactness

    assert exactness(net) == "lower bound"
    assert exactness(torch.nn.Linear(64, 64)) == "exact"  # of another training

"""Memory that is easily mistaken for that of torch's allocator, or easily missed."""

from __future__ import annotations

import gc
import threading
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
import torch
from support.allocator import AllocatorTruth, Truth
from torch import Tensor, nn
from torch.autograd import forward_ad
from torch.func import hessian, jvp
from torch.utils.checkpoint import checkpoint

from memlog import MemoryTracer

pytestmark = pytest.mark.slow  # together they take longer than a quick look may

TOLERANCE = 0.002
ARRAY = np.ones((64, 512), np.float32)
X = torch.linspace(-1, 1, 64 * 512).reshape(64, 512)


def compared(model: Any, work: Callable[[], Any]) -> tuple[Truth, Any]:
    """Run ``work`` three times: to warm up, measured by the allocator, and traced."""
    kept = work()
    del kept
    gc.collect()
    with AllocatorTruth() as allocator:
        kept = work()
    del kept
    gc.collect()
    tracer = MemoryTracer()
    with tracer.trace(model):
        kept = work()
    del kept
    assert not tracer.health.faults
    return allocator.result(), tracer.result


def agrees(model: Any, work: Callable[[], Any], exactness: str = "exact") -> Any:
    truth, result = compared(model, work)
    assert result.peak - result.before == pytest.approx(truth.peak, rel=TOLERANCE)
    assert result.end - result.before == truth.end
    assert result.exactness == exactness
    return result


ON_NUMPYS_MEMORY: dict[str, Callable[[], Tensor]] = {
    "from_numpy": lambda: torch.from_numpy(ARRAY),
    "as_tensor": lambda: torch.as_tensor(ARRAY),
    "asarray": lambda: torch.asarray(ARRAY),
    "frombuffer": lambda: torch.frombuffer(ARRAY.data, dtype=torch.float32).reshape(64, 512),
    "from_dlpack": lambda: torch.from_dlpack(ARRAY),
}


@pytest.mark.parametrize("name", ON_NUMPYS_MEMORY)
def test_numpys_memory_is_not_the_allocators(name: str) -> None:
    make = ON_NUMPYS_MEMORY[name]
    agrees(nn.Identity(), lambda: (make(), torch.ones(1)))


def test_a_batch_on_numpys_memory_is_not_the_allocators() -> None:
    model = nn.Linear(512, 4)

    def step() -> None:
        model(torch.from_numpy(ARRAY)).sum().backward()
        model.zero_grad()

    assert "inputs" not in agrees(model, step).categories


def test_a_copy_of_numpys_memory_is_the_allocators_once() -> None:
    result = agrees(nn.Identity(), lambda: torch.tensor(ARRAY))
    assert result.end == ARRAY.nbytes


def dual() -> Any:
    model = nn.Sequential(nn.Linear(512, 64), nn.Tanh(), nn.Linear(64, 8))
    with forward_ad.dual_level():
        return forward_ad.unpack_dual(model(forward_ad.make_dual(X, torch.ones_like(X))))


ZEROS: dict[str, Callable[[], Any]] = {
    "torch's own": lambda: (torch._efficientzerotensor((1000, 1000)), torch.ones(1)),
    "dual numbers": dual,
    "jvp": lambda: jvp(nn.Linear(512, 64), (X,), (torch.ones_like(X),)),
    "hessian": lambda: hessian(lambda x: (x * x).sum() * x[0])(X[0, :32]),
}


# Forward-mode differentiation compiles its rules with what torch has deprecated itself.
@pytest.mark.filterwarnings("ignore:`torch.jit:DeprecationWarning")
@pytest.mark.parametrize("name", ZEROS)
def test_zeros_that_hold_nothing_take_nothing(name: str) -> None:
    truth, result = compared(None, ZEROS[name])
    assert result.peak - result.before == pytest.approx(truth.peak, rel=TOLERANCE)
    assert result.end - result.before == truth.end


def test_gradients_that_another_thread_made_were_not_there_before() -> None:
    model = nn.Linear(512, 64)

    def step() -> None:
        model.zero_grad()
        loss = model(X).sum()
        backward = threading.Thread(target=loss.backward)
        backward.start()
        backward.join()

    gradients = model.weight.nbytes + model.bias.nbytes
    tracer = MemoryTracer()
    for old in (0, gradients):
        with tracer.trace(model):
            step()
        result: Any = tracer.result
        assert result.before == gradients + X.nbytes + old  # as large as the parameters
        assert result.end - result.before == gradients - old
        assert result.categories["gradients"] == gradients
        assert result.exactness == "lower bound"
        assert any("gradients" in sentence for sentence in result.unseen)


@pytest.fixture
def precise() -> Iterator[None]:
    yield
    torch.set_float32_matmul_precision("highest")


@pytest.mark.usefixtures("precise")
def test_what_was_measured_counts_for_its_precision_alone() -> None:
    model = nn.Sequential(nn.Linear(512, 512), nn.Linear(512, 512))

    @torch.no_grad()
    def step() -> None:
        model(X)

    agrees(model, step)
    torch.set_float32_matmul_precision("medium")
    agrees(model, step)
    torch.set_float32_matmul_precision("highest")
    agrees(model, step)


@pytest.mark.usefixtures("precise")
def test_a_precision_that_changes_in_mid_trace_makes_no_exact_peak() -> None:
    tracer, model = MemoryTracer(), nn.Linear(512, 512)
    with tracer.trace(model):
        torch.set_float32_matmul_precision("medium")
        model(X)
    assert tracer.result.exactness == "lower bound"
    assert any("precision" in sentence for sentence in tracer.result.unseen)


class Nest(nn.Module):
    """Checkpoints within checkpoints, so that several states are kept at a time."""

    def __init__(self, depth: int) -> None:
        super().__init__()
        self.linear = nn.Linear(32, 32)
        self.deeper = Nest(depth - 1) if depth else None

    def forward(self, x: Tensor) -> Any:
        x = self.linear(x).tanh()
        if self.deeper is None:
            return x
        return checkpoint(
            self.deeper, checkpoint(self.linear, x, use_reentrant=False), use_reentrant=False
        )


class Reentrant(nn.Module):
    """Model with each layer in a reentrant checkpoint, torch's older kind."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(32, 32) for _ in range(6))

    def forward(self, x: Tensor) -> Any:
        for layer in self.layers:
            x = checkpoint(layer, x, use_reentrant=True)
        return x


@pytest.mark.parametrize("make", [lambda: Nest(4), Reentrant], ids=["nested", "reentrant"])
def test_the_random_states_of_checkpoints_count(make: Callable[[], nn.Module]) -> None:
    model = make()
    x = torch.ones(4, 32, requires_grad=True)

    def step() -> None:
        model(x).sum().backward()
        model.zero_grad()
        x.grad = None

    agrees(model, step)
    agrees(model, lambda: model(x))


@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors:UserWarning")
def test_nested_tensors_make_no_exact_peak() -> None:
    model = nn.Linear(8, 8)

    def work() -> Any:
        ragged = torch.nested.nested_tensor([torch.ones(5, 8), torch.ones(7, 8)])
        return torch.nested.to_padded_tensor(model(ragged), 0.0)

    truth, result = compared(model, work)
    assert result.exactness == "lower bound"
    assert result.peak - result.before <= truth.peak
    assert any("nested" in sentence for sentence in result.unseen)


def test_fake_tensors_of_torch_itself_cause_no_warning(recwarn: pytest.WarningsRecorder) -> None:
    tracer = MemoryTracer()
    with tracer.trace():
        torch.func.linearize(torch.sin, torch.ones(4, 8))
    assert not [each for each in recwarn if "data pointer" in str(each.message)]
    assert not tracer.health.faults

"""Estimates of steps with code that ``torch.compile`` has compiled, on the CPU."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

import memlog
from benchmarks.estimates.__main__ import peak
from benchmarks.estimates.compiled import compared, real_peak
from benchmarks.estimates.models import cases
from benchmarks.estimates.optimizers import OPTIMIZERS

pytestmark = [
    pytest.mark.skipif(not memlog.torchside.compiled_code.can_plan(), reason="needs a newer torch"),
    pytest.mark.filterwarnings("ignore"),  # torch's compiler warns about its own code
]


@pytest.fixture(autouse=True)
def _compiler() -> Any:
    torch.compiler.reset()
    yield
    torch.compiler.reset()


def layers() -> nn.Module:
    torch.manual_seed(0)
    hidden = (nn.Linear(128, 256), nn.GELU(), nn.Dropout(0.1), nn.LayerNorm(256))
    return nn.Sequential(*hidden, nn.Linear(256, 256), nn.ReLU(), nn.Linear(256, 10))


def compiled() -> Any:
    return torch.compile(layers())


def step(model: Any, optimizer: Any, batch: int) -> None:
    inputs, targets = torch.randn(batch, 128), torch.randint(10, (batch,))
    functional.cross_entropy(model(inputs), targets).backward()
    optimizer.step()
    optimizer.zero_grad()


def estimated(make: Any = compiled, batch: int = 512, **changed: Any) -> memlog.Estimate:
    arguments: dict[str, Any] = {"optimizer": OPTIMIZERS["SGD"], "device": "cpu", "step": step}
    return memlog.estimate(**(arguments | changed), model=make, batch=batch)


def test_a_compiled_step_needs_what_it_really_allocates() -> None:
    found = estimated()
    real = real_peak(compiled, step, "SGD", 512)
    assert found.peak == pytest.approx(real, rel=1e-3)
    assert estimated(layers).peak > real * 1.05, "compiled or not makes no difference to this model"
    assert not found.uncounted
    assert found.categories["activations"]


def test_blocks_a_loss_and_an_optimizer_may_be_compiled_alone() -> None:
    """The graphs between the compiled functions run as they do without a compiler."""

    def blocks() -> nn.Module:
        model: Any = layers()
        model[4] = torch.compile(model[4])
        return model

    @torch.compile
    def loss(model: nn.Module, inputs: Tensor, targets: Tensor) -> Tensor:
        torch._dynamo.graph_break()
        return functional.cross_entropy(model(inputs), targets)

    @torch.compile
    def update(optimizer: torch.optim.Optimizer) -> None:
        optimizer.step()

    def partly(model: Any, optimizer: Any, batch: int) -> None:
        loss(model, torch.randn(batch, 128), torch.randint(10, (batch,))).backward()
        update(optimizer)
        optimizer.zero_grad()

    found = estimated(blocks, step=partly, optimizer=torch.optim.AdamW)
    model = blocks()
    optimizer = torch.optim.AdamW(model.parameters())
    for _ in range(3):
        partly(model, optimizer, 512)
    kept = 3 * sum(each.nbytes for each in model.parameters())
    real = kept + peak(lambda: [partly(model, optimizer, 512) for _ in range(2)])
    assert found.peak == pytest.approx(real, rel=1e-3)


def test_an_estimate_and_a_training_in_one_process_do_not_share_compiled_code() -> None:
    """Kernels of an estimate do nothing, and kernels of a training must not get fake tensors."""

    @torch.compile
    def ones(count: int) -> Tensor:
        return torch.ones(count).cumsum(0) + 1

    def with_ones(model: Any, optimizer: Any, batch: int) -> None:
        (model(torch.randn(batch, 128)).sum(1) * ones(batch)).sum().backward()
        optimizer.step()

    before = ones(4)
    first = estimated(layers, batch=4, step=with_ones)
    assert torch.equal(ones(4), before)
    assert torch.equal(ones(4), torch.tensor([2.0, 3.0, 4.0, 5.0]))
    assert estimated(layers, batch=4, step=with_ones).peak == first.peak


def test_estimates_of_other_batches_do_not_make_shapes_symbols() -> None:
    sizes = [estimated(batch=batch).peak for batch in (256, 512)]
    graphs = torch._dynamo.utils.counters["stats"]["unique_graphs"]
    shapes: list[Any] = []

    def backend(graph: Any, inputs: Any) -> Any:
        shapes.append([*inputs[0].shape])
        return graph.forward

    torch.compile(layers(), backend=backend)(torch.randn(64, 128))
    assert all(type(side) is int for side in shapes[0])
    torch.compiler.reset()
    assert [estimated(batch=batch).peak for batch in (512, 256)] == sizes[::-1]
    assert graphs


def test_eager_backends_run_as_without_a_compiler() -> None:
    def eager() -> Any:
        return torch.compile(layers(), backend="eager")

    assert estimated(eager).peak == estimated(layers).peak


@pytest.mark.parametrize(
    ("options", "changed", "message"),
    [
        ({"backend": lambda graph, _: graph.forward}, {}, "with the backend <lambda>"),
        ({"mode": "max-autotune"}, {}, "compiled with max_autotune"),
        ({}, {"device": "cuda"}, "on a CUDA device"),
    ],
)
def test_what_inductor_does_not_plan_is_refused(options: Any, changed: Any, message: str) -> None:
    function = torch.compile(torch.sin, **options)

    def step(model: Any, optimizer: Any, batch: int) -> None:
        function(model(torch.randn(batch, 128))).sum().backward()
        optimizer.step()

    with pytest.raises(memlog.ConfigurationError, match=message):
        estimated(layers, step=step, **changed)


def test_products_into_a_given_buffer_leave_its_shape() -> None:
    """Compiled code gives each product its result (``out=``)."""
    shapes = []

    def step(model: Any, batch: int) -> None:
        first, second = torch.randn(batch, 600), torch.randn(600, 700)
        many, products = torch.empty(4, batch, 700), torch.empty(batch, 700)
        torch.addmm(torch.zeros(700), first, second, out=products)
        torch.bmm(first.expand(4, batch, 600), second.expand(4, 600, 700), out=many)
        shapes.append((products.shape, many.shape))

    found = memlog.estimate(step, model=layers, batch=512, device="cpu")
    assert shapes == [((512, 700), (4, 512, 700))] * 2
    assert not found.uncounted


@pytest.mark.slow
@pytest.mark.parametrize(
    "options", [{"fullgraph": True}, {"dynamic": True}, {"mode": "reduce-overhead"}]
)
def test_options_that_inductor_plans(options: Any) -> None:
    def model() -> Any:
        return torch.compile(layers(), **options)

    assert estimated(model).peak == pytest.approx(real_peak(model, step, "SGD", 512), rel=1e-3)


@pytest.mark.slow
@pytest.mark.parametrize(
    "name",
    ["UNet", "transformer encoder", "transformers BertModel", "transformers GPT2LMHeadModel"],
)
def test_models_of_the_benchmark_are_within_a_hundredth(name: str) -> None:
    case = next(each for each in cases() if each.name == name)
    training = compared(case, "AdamW", case.batches[0])
    assert training.estimated == pytest.approx(training.measured, rel=0.01)

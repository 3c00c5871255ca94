"""Features of real models: nesting, reuse, sharing, views, functions, attention, checkpoints, precision."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from support.models import GPT, text
from torch import Tensor, nn

from memlog import MemoryTracer
from memlog.trace.records import PhaseFigures


def traced(model: nn.Module, batch: Tensor, *, backward: bool = True) -> MemoryTracer:
    tracer = MemoryTracer()
    with tracer.trace(model):
        out = model(batch)
        if backward:
            out.float().square().mean().backward()
    assert not tracer.health.faults
    return tracer


def phase(tracer: MemoryTracer, path: str, name: str) -> PhaseFigures:
    figures = tracer.get_layer_figures(path).phase(name)
    assert figures is not None, f"{path} was not active in {name}"
    return figures


@pytest.mark.seed(179)
def test_a_nested_modules_bytes_are_its_own_and_its_parents_in_total() -> None:
    model = nn.Sequential(nn.Sequential(nn.Linear(4, 8), nn.Tanh()), nn.Linear(8, 2))
    tracer = traced(model, torch.randn(3, 4))

    assert phase(tracer, "0.0", "forward").allocated == 3 * 8 * 4
    assert tracer.get_layer_figures("0").allocated == 0
    assert tracer.get_layer_figures("0").at_peak_total == sum(
        tracer.get_layer_figures(path).at_peak for path in ("0", "0.0", "0.1")
    )
    root = tracer.get_layer_figures("Sequential")
    outside = sum(share.size for share in tracer.result.shares if share.path.startswith("("))
    assert root.at_peak_total == (tracer.result.peak or 0) - outside
    assert root.peak == max(
        tracer.get_layer_figures(path).peak or 0 for path in ("0", "0.0", "0.1", "1")
    )


@pytest.mark.seed(195)
def test_the_backward_pass_of_every_layer_is_known() -> None:
    model = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 2, bias=False))
    tracer = traced(model, torch.randn(3, 4))

    # Its weight's and its input's gradient.
    assert phase(tracer, "2", "backward").allocated == 2 * 8 * 4 + 3 * 8 * 4
    assert phase(tracer, "0", "backward").allocated >= 4 * 8 * 4
    assert phase(tracer, "1", "backward").time_ms > 0


@pytest.mark.seed(187)
def test_a_module_that_is_called_several_times_is_counted_each_time() -> None:
    class Repeated(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.cell = nn.Linear(8, 8)

        def forward(self, x: Tensor) -> Tensor:
            for _ in range(5):
                x = self.cell(x).tanh()
            return x

    tracer = traced(Repeated(), torch.randn(3, 8))
    forward = phase(tracer, "cell", "forward")
    assert (forward.calls, forward.allocated) == (5, 5 * 3 * 8 * 4)
    # What is written in the module's own forward, outside its children, is its own.
    assert phase(tracer, "Repeated", "forward").allocated == 5 * 3 * 8 * 4
    assert phase(tracer, "cell", "backward").allocated > 0


def test_a_shared_module_is_distinguished_by_its_caller() -> None:
    class Side(nn.Module):
        def __init__(self, shared: nn.Module) -> None:
            super().__init__()
            self.shared = shared

        def forward(self, x: Tensor) -> Tensor:
            out: Tensor = self.shared(x)
            return out

    shared = nn.Linear(8, 8)
    model = nn.Sequential(Side(shared), Side(shared))
    tracer = traced(model, torch.randn(2, 8))
    assert phase(tracer, "0.shared", "forward").calls == 1
    assert phase(tracer, "1.shared", "forward").calls == 1
    # The parameters exist once, and belong to the first.
    owners = {share.path for share in tracer.result.shares if share.category == "parameters"}
    assert owners == {"0.shared"}


def test_in_place_activations_and_views_allocate_nothing() -> None:
    model = nn.Sequential(nn.Linear(8, 8), nn.ReLU(inplace=True), nn.Dropout(0.0, inplace=True))
    tracer = traced(model, torch.randn(4, 8))
    assert phase(tracer, "1", "forward").allocated == 0

    class Only(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return x.view(2, -1).t()[1:].unsqueeze(0)

    viewed = traced(Only(), torch.randn(4, 8), backward=False)
    assert phase(viewed, "Only", "forward").allocated == 0


@pytest.mark.parametrize("training", [True, False])
@pytest.mark.seed(230)
def test_multihead_attention_has_what_it_allocates(training: bool) -> None:
    model = nn.MultiheadAttention(16, 4, batch_first=True)
    model.train(training)

    class Itself(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.attention = model

        def forward(self, x: Tensor) -> Tensor:
            out: Tensor = self.attention(x, x, x)[0]
            return out

    with torch.set_grad_enabled(training):
        tracer = traced(Itself(), torch.randn(2, 8, 16), backward=training)
    assert phase(tracer, "attention", "forward").allocated > 2 * 8 * 16 * 4
    if training:
        assert phase(tracer, "attention", "backward").allocated > 2 * 8 * 16 * 4


@pytest.mark.parametrize("way", ["reentrant", "not reentrant"])
def test_recomputing_is_a_phase_of_its_own(way: str) -> None:
    model = GPT(checkpointing=way)
    tracer = traced(model, text())

    forward, again = (phase(tracer, "blocks.1.mlp.0", name) for name in ("forward", "recompute"))
    assert again.calls == forward.calls == 1
    assert again.allocated == forward.allocated > 0
    assert phase(tracer, "blocks.1.mlp.0", "backward").allocated > 0
    assert tracer.result.categories["recompute"] > 0
    assert tracer.get_layer_figures("head").phase("recompute") is None


def test_a_backward_pass_inside_forward_is_no_recomputation() -> None:
    class Penalty(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = nn.Linear(4, 4)

        def forward(self, x: Tensor) -> Tensor:
            x = x.requires_grad_()
            energy = self.inner(x).square().sum()
            (slope,) = torch.autograd.grad(energy, x, create_graph=True)
            return slope

    tracer = traced(Penalty(), torch.randn(3, 4))
    inner = tracer.get_layer_figures("inner")
    assert {figures.phase for figures in inner.phases} == {"forward", "backward"}


def test_a_gradient_of_gradients_belongs_to_the_layers() -> None:
    """As in the penalty of a WGAN's critic. Later tensors do not belong to the layers."""
    critic = nn.Sequential(nn.Linear(32, 512), nn.Tanh(), nn.Linear(512, 1))
    batch = torch.randn(256, 32, requires_grad=True)
    tracer = MemoryTracer()
    with tracer.trace(critic):
        (slope,) = torch.autograd.grad(critic(batch).sum(), batch, create_graph=True)
        slope.square().sum().backward()
    assert tracer.result.attributed > 0.9
    # What squares them keeps two of their size.
    assert tracer.result.unattributed["backward"] <= 3 * slope.nbytes
    hidden = 4 * 256 * 512
    # Of tanh: its gradient, and of that the gradients that its own gradient and its input get.
    assert phase(tracer, "1", "backward").allocated >= 3 * hidden
    assert not tracer.health.faults


def test_what_follows_a_backward_pass_that_made_a_graph_is_of_no_layer() -> None:
    model = nn.Sequential(nn.Linear(32, 64), nn.Tanh())
    batch = torch.randn(256, 32, requires_grad=True)

    def backward_outside(*, first: bool) -> int:
        tracer = MemoryTracer()
        with tracer.trace(model):
            out = model(batch)
            if first:
                torch.autograd.grad(out.sum(), batch, create_graph=True)
            batch.sin().exp().sum().backward()
        return tracer.result.unattributed["backward"]

    alone = backward_outside(first=False)
    assert alone >= 2 * batch.nbytes
    assert backward_outside(first=True) >= alone


def test_autocast_copies_belong_to_the_module_that_needs_them() -> None:
    model = nn.Sequential(nn.Linear(32, 32), nn.Linear(32, 32))
    tracer = MemoryTracer()
    with tracer.trace(model):
        with torch.autocast("cpu", dtype=torch.bfloat16):
            out = model(torch.randn(4, 32))
        out.float().sum().backward()
    # Its weight, its bias and its input, in two bytes each, and what it returns.
    assert phase(tracer, "0", "forward").allocated == 2 * (32 * 32 + 32 + 4 * 32 + 4 * 32)
    assert not tracer.health.faults


def test_gradients_accumulate_in_one_place() -> None:
    model = nn.Linear(16, 16, bias=False)
    tracer = MemoryTracer()
    with tracer.trace(model):
        for _ in range(3):
            model(torch.randn(2, 16)).sum().backward()
    held = [share for share in tracer.result.shares if share.category == "gradients"]
    assert [(share.path, share.size) for share in held] == [("Linear", 16 * 16 * 4)]
    assert phase(tracer, "Linear", "forward").calls == 3


def test_storages_that_are_resized_change_their_size() -> None:
    model = nn.Linear(1, 1)
    tracer = MemoryTracer()
    with tracer.trace(model):
        gathered = torch.empty(1000)
        gathered.untyped_storage().resize_(0)
        gathered.untyped_storage().resize_(4000)
        grown = torch.empty(0)
        torch.add(torch.ones(500), 1, out=grown)
        grown.resize_(600)
    result: Any = tracer.result
    assert result.end - result.before == 4000 + 2400
    assert result.peak - result.before == 4000 + 2000 + 2000
    assert "resize_" not in torch.UntypedStorage.__dict__


def test_a_child_that_is_called_like_the_models_class_is_another_layer() -> None:
    class Attention(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.Attention = nn.Linear(8, 8)

        def forward(self, x: Tensor) -> Tensor:
            out: Tensor = self.Attention(x) * torch.ones(1000, 8).sum()
            return out

    tracer = traced(Attention(), torch.randn(4, 8))
    assert {"Attention", "Attention (model)"} <= set(tracer.get_layer_stats())
    own, child = (
        phase(tracer, "Attention (model)", "forward"),
        phase(tracer, "Attention", "forward"),
    )
    assert (own.calls, child.calls) == (1, 1)
    assert own.allocated is not None
    assert child.allocated == 4 * 8 * 4
    assert own.allocated >= 32_000
    # The child's weight and bias are the child's.
    held = {share.path for share in tracer.result.shares if share.category == "parameters"}
    assert held == {"Attention"}
    root = tracer.get_layer_figures("Attention (model)")
    assert root.at_peak_total is not None
    assert root.at_peak_total >= (tracer.get_layer_figures("Attention").at_peak_total or 0)


def test_a_lazy_modules_parameters_are_parameters() -> None:
    model = nn.Sequential(nn.LazyLinear(64), nn.ReLU())
    tracer = MemoryTracer()
    with tracer.trace(model):
        out = model(torch.ones(4, 32))
    assert not tracer.health.faults
    sizes = {share.category: share.size for share in tracer.result.shares if share.path == "0"}
    assert sizes["parameters"] == 4 * (32 * 64 + 64)
    assert out.shape == (4, 64)


def test_fake_tensors_hold_nothing() -> None:
    from torch._subclasses.fake_tensor import FakeTensorMode

    tracer = MemoryTracer()
    with tracer.trace(nn.Identity()), FakeTensorMode():
        made = torch.empty(1 << 30) + 1
    assert made.shape == (1 << 30,)
    assert tracer.result.peak == 0


def test_somebody_elses_resize_stays_theirs() -> None:
    base: Any = torch._C.StorageBase
    calls: list[int] = []

    def theirs(storage: Any, size: int) -> Any:
        calls.append(size)
        return base.resize_(storage, size)

    def resize(size: int) -> None:
        torch.empty(8).untyped_storage().resize_(size)

    storage: Any = torch.UntypedStorage
    tracer = MemoryTracer()
    try:
        storage.resize_ = theirs
        with tracer.trace(nn.Identity()):
            resize(100)
        assert vars(storage)["resize_"] is theirs
        del storage.resize_
        with tracer.trace(nn.Identity()):
            ours, storage.resize_ = vars(storage)["resize_"], theirs
            resize(200)
        assert vars(storage)["resize_"] is theirs
        storage.resize_ = ours  # as they put back what they found
        resize(300)
        with tracer.trace(nn.Identity()):
            resize(400)
    finally:
        if "resize_" in vars(storage):
            del storage.resize_
    assert calls == [100, 200]
    assert not tracer.health.faults


def test_a_library_that_imported_the_patched_backward_in_a_trace_can_call_it_afterwards() -> None:
    model = nn.Linear(2, 2)
    with MemoryTracer().trace(model):
        from torch.autograd import _engine_run_backward as imported
    loss = model(torch.ones(1, 2)).sum()
    imported((loss,), (torch.ones(()),), False, False, (), accumulate_grad=True)
    assert model.weight.grad is not None


def test_a_library_may_put_the_patched_backward_back_after_a_trace(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    model = nn.Linear(2, 2)
    with MemoryTracer().trace(model):
        patched = torch.autograd._engine_run_backward
    monkeypatch.setattr(torch.autograd, "_engine_run_backward", patched)
    with MemoryTracer().trace(model):
        model(torch.ones(1, 2)).sum().backward()
    assert model.weight.grad is not None
    assert torch.autograd._engine_run_backward is not patched

"""Memory that estimates count besides tensors' shapes, and memory that they name as not counted."""

from __future__ import annotations

from contextlib import nullcontext
from typing import Any

import pytest
import torch
from support.training import Case, estimate_of, measured_peak, squares
from torch import nn
from torch.autograd.graph import save_on_cpu

import memlog
from memlog.estimates.estimate import estimate_made_by

MIB = 1024**2


def test_what_is_not_counted_is_named() -> None:
    model = nn.Linear(256, 256)
    library = torch.library.Library("memlog_estimates", "DEF")
    library.define("twice(Tensor x) -> Tensor")
    library.impl("twice", torch.empty_like, "Meta")

    def own(model: nn.Module, batch: int) -> None:
        torch.ops.memlog_estimates.twice(model(torch.randn(batch, 256)))

    found = memlog.estimate(own, model=model, batch=4, device="cpu")
    assert "memlog_estimates.twice" in " ".join(found.uncounted)
    assert "Warning: " in found.text()
    found = memlog.estimate(lambda model: model(torch.randn(4, 256)), model=model, device="cpu")
    assert not found.uncounted
    assert "Warning" not in found.text()


def test_derivatives_that_differ_on_fake_tensors_are_named() -> None:
    def train(model: nn.Module, batch: int) -> None:
        out = model(torch.randn(batch, 256))
        nn.functional.binary_cross_entropy_with_logits(
            out, torch.zeros_like(out), pos_weight=torch.ones(256)
        ).backward()

    found = memlog.estimate(train, model=nn.Linear(256, 256), batch=4_000, device="cpu")
    assert "BinaryCrossEntropyWithLogitsBackward0" in " ".join(found.uncounted)


def test_a_product_with_a_large_sparse_matrix_makes_no_dense_one() -> None:
    nodes = 200_000

    def train(model: nn.Module) -> None:
        edges = torch.randint(nodes, (2, nodes))
        graph = torch.sparse_coo_tensor(
            edges, torch.ones(nodes), (nodes, nodes), check_invariants=False
        )
        torch.sparse.mm(graph, model(torch.randn(nodes, 64))).square().mean().backward()

    found = memlog.estimate(train, model=nn.Linear(64, 64), device="cpu")
    assert 4 * nodes * 64 < found.peak < 10 * 4 * nodes * 64
    assert "aten.mm.default" in " ".join(found.uncounted)


def test_normalisations_of_two_types_are_counted() -> None:
    def model() -> nn.Module:
        return nn.Sequential(nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8), nn.ReLU(), nn.Conv2d(8, 8, 3))

    case = Case(model, lambda batch: torch.randn(batch, 3, 24, 24), squares, 40)
    found = estimate_of(case, autocast=True)
    assert found.peak == pytest.approx(measured_peak(case, autocast=True), rel=0.002)
    assert not found.uncounted


def test_a_learned_mask_of_attention_gets_one_gradient_a_score() -> None:
    def attend() -> None:
        query = torch.randn(4, 2, 512, 16, requires_grad=True)
        bias = torch.randn(1, 2, 512, 512, requires_grad=True)
        nn.functional.scaled_dot_product_attention(
            query, query, query, attn_mask=bias
        ).sum().backward()
        assert bias.grad is not None
        assert bias.grad.shape == bias.shape

    assert 10 * MIB < memlog.estimate(attend, device="cuda").peak < 20 * MIB


def sequences(out: torch.Tensor) -> torch.Tensor:
    steps, samples, _ = out.shape
    words = torch.arange(samples * 10).reshape(samples, 10) % 63 + 1
    return nn.functional.ctc_loss(out.log_softmax(-1), words, [steps] * samples, [10] * samples)


def test_ctc_loss_with_lengths_in_lists_is_counted() -> None:
    case = Case(lambda: nn.Linear(32, 64), lambda batch: torch.randn(50, batch, 32), sequences, 40)
    found = estimate_of(case)
    assert found.peak == pytest.approx(measured_peak(case), rel=0.005)
    assert not found.uncounted


class Recurrent(nn.Module):
    """A trained LSTM, which gets the output of an LSTM that is not trained."""

    def __init__(self) -> None:
        super().__init__()
        self.fixed = nn.LSTM(24, 24, bias=False)
        self.trained = nn.LSTM(24, 40, 2, bidirectional=True)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        with torch.no_grad():
            x = self.fixed(x)[0]
        out: torch.Tensor = self.trained(x)[0]
        return out


@pytest.mark.parametrize("length", [7, 70])
def test_what_an_lstm_keeps_is_counted(length: int) -> None:
    case = Case(Recurrent, lambda batch: torch.randn(length, batch, 24), squares, 16)
    found = estimate_of(case)
    assert found.peak == pytest.approx(measured_peak(case), rel=0.005)
    assert not found.uncounted


def test_tensors_and_models_around_the_step_are_counted_once() -> None:
    """If the step uses a tensor that is not its argument, one fake tensor replaces that tensor."""
    model, teacher = nn.Linear(1000, 10), nn.Linear(1000, 10)
    inputs, table = torch.zeros(64, 1000), torch.zeros(500, 1000)

    def around() -> None:
        with torch.no_grad():
            soft = teacher(inputs)
        (model(inputs) - soft).sum().backward()
        model(table[::2]).sum().backward()

    def given(model: nn.ModuleList, batch: tuple[torch.Tensor, torch.Tensor]) -> None:
        with torch.no_grad():
            soft = model[1](batch[0])
        (model[0](batch[0]) - soft).sum().backward()
        model[0](batch[1][::2]).sum().backward()

    for device in ("cuda", "cpu"):
        one = memlog.estimate(around, model=model, device=device)
        other = memlog.estimate(
            given, model=nn.ModuleList([model, teacher]), batch=(inputs, table), device=device
        )
        assert one.recording.result.peak == other.recording.result.peak
        assert one.recording.result.categories == other.recording.result.categories
        assert one.categories["parameters"] == 2 * 4 * (1000 * 10 + 10)


def made_on_cuda(kind: str) -> memlog.Estimate:
    """Return the estimate of a job that names its devices. ``kind``: What the job has on the host."""

    def job() -> dict[str, Any]:
        model = nn.Sequential(nn.Linear(256, 256), nn.ReLU(), nn.Linear(256, 256)).to("cuda")
        optimizer = torch.optim.AdamW(model.parameters())
        data = torch.randn(40_000, 256)

        def step() -> None:
            if kind == "dataset":
                inputs = data[torch.randint(40_000, (512,))].to(model[0].weight.device)
            else:
                inputs = torch.randn(512, 256, device="cuda")
            with save_on_cpu() if kind == "activations" else nullcontext():
                outputs = model(inputs)
            kept = [outputs.detach().cpu() for _ in range(20)] if kind == "outputs" else []
            outputs.square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
            del kept

        return {"step": step, "model": model, "optimizer": optimizer}

    return estimate_made_by(job, device="cuda")


def test_on_cuda_tensors_on_the_host_do_not_count() -> None:
    plain = made_on_cuda("nothing")
    for kind, on_host in (("dataset", 40_000 * 1024), ("outputs", 20 * 512 * 1024)):
        found = made_on_cuda(kind)
        assert found.peak == plain.peak, kind
        assert found.on_host >= on_host, kind
    assert made_on_cuda("activations").peak < plain.peak
    assert "tensors on the host, not in the peak" in made_on_cuda("dataset").text()


def test_the_device_that_a_program_chooses_stands_for_cuda(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Without CUDA, ``"cuda" if torch.cuda.is_available() else "cpu"`` is the CPU."""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    data, held = torch.randn(40_000, 256), []

    def found(chosen: str, kind: type) -> memlog.Estimate:
        device = kind(chosen)

        def step(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
            inputs = torch.cat([data[:256].to(device), torch.randn(256, 256, device=device)])
            outputs = model(inputs.to(device))
            outputs.square().mean().backward()
            held[:] = [outputs.detach().cpu()]
            optimizer.step()
            optimizer.zero_grad()

        return memlog.estimate(
            step, model=lambda: nn.Linear(256, 256).to(device), optimizer=torch.optim.Adam
        )

    for kind in (str, torch.device):
        named, chosen = found("cuda", kind), found("cpu", kind)
        assert chosen.on_host == named.on_host >= data.nbytes
        assert (chosen.peak, chosen.reserved) == (named.peak, named.reserved)
        assert chosen.categories == named.categories


def test_the_name_of_the_cpu_means_the_host_beside_that_of_cuda() -> None:
    def step(model: nn.Module) -> None:
        average = torch.zeros(4_000, 256, device="cpu")
        average += model(torch.randn(8, 256).cuda()).sum().cpu()

    found = memlog.estimate(step, model=nn.Linear(256, 256))
    assert found.on_host >= 4_000 * 1024
    assert found.categories.get("inputs", 0) < 4_000 * 1024


def test_a_program_that_names_no_device_runs_on_the_device_as_a_whole() -> None:
    data = torch.randn(40_000, 256)

    def step(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
        model(data[:512]).square().mean().backward()
        optimizer.step()

    found = memlog.estimate(step, model=lambda: nn.Linear(256, 256), optimizer=torch.optim.SGD)
    assert found.peak > data.nbytes
    assert found.on_host == 0


def test_lbfgs_is_estimated_with_a_full_history() -> None:
    def job(history: int) -> dict[str, Any]:
        model = nn.Linear(256, 256, bias=False)
        optimizer = torch.optim.LBFGS(model.parameters(), max_iter=2, history_size=history)

        def closure() -> torch.Tensor:
            optimizer.zero_grad()
            loss = model(torch.randn(4, 256)).square().mean()
            loss.backward()
            return loss

        return {"step": lambda: optimizer.step(closure), "model": model, "optimizer": optimizer}

    small, large = (estimate_made_by(lambda n=n: job(n), device="cpu").peak for n in (5, 15))
    assert large - small == pytest.approx(2 * 10 * 256 * 256 * 4, rel=0.01)


class Packed(nn.Module):
    """A recurrent layer over sequences of several lengths."""

    def __init__(self, kind: Any, shortest: int) -> None:
        super().__init__()
        self.rnn, self.shortest = kind(32, 64, batch_first=True), shortest

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        lengths = [max(self.shortest, x.shape[1] - row) for row in range(len(x))]
        out, _ = self.rnn(nn.utils.rnn.pack_padded_sequence(x, lengths, batch_first=True))
        found: torch.Tensor = nn.utils.rnn.pad_packed_sequence(out, batch_first=True)[0]
        return found


@pytest.mark.parametrize("kind", [nn.GRU, nn.LSTM])
def test_packed_sequences_are_counted_by_their_lengths(kind: Any) -> None:
    def case(shortest: int) -> Case:
        return Case(
            lambda: Packed(kind, shortest), lambda batch: torch.randn(batch, 64, 32), squares, 64
        )

    short, full = (estimate_of(case(shortest)).peak for shortest in (8, 64))
    assert short == pytest.approx(measured_peak(case(8)), rel=0.02)
    assert short < 0.8 * full


@pytest.mark.parametrize("part", ["lengths", "data", "mask"])
def test_cpu_in_a_program_that_names_no_device_leaves_the_model_on_the_device(part: str) -> None:
    def step(model: nn.Module, optimizer: torch.optim.Optimizer, batch: int) -> None:
        inputs = torch.randn(batch, 8, 256)
        if part == "lengths":
            lengths = torch.full((batch,), 8).cpu()
            packed = nn.utils.rnn.pack_padded_sequence(inputs, lengths, batch_first=True)
            outputs = model(packed.data)
        elif part == "data":
            outputs = model(inputs.cpu()[torch.arange(batch)])
        else:
            outputs = model(inputs) * torch.rand(batch, 8, 1).cpu()
        outputs.square().mean().backward()
        optimizer.step()

    def make() -> nn.Module:
        return nn.Sequential(nn.Linear(256, 1024), nn.ReLU(), nn.Linear(1024, 256))

    found = memlog.estimate(step, model=make, optimizer=torch.optim.Adam, batch=64)
    parameters = sum(one.nbytes for one in make().parameters())
    assert found.categories["parameters"] == parameters
    assert found.peak > 4 * parameters
    assert found.on_host < 2 * 2**20

"""Estimates of whole training steps, compared with the allocator's own figures for the same training."""

from __future__ import annotations

import gc
import json
import weakref
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch
from support import child
from support.training import CASES, Case, estimate_of, measured_peak
from torch import nn
from torch._subclasses.fake_tensor import FakeTensor
from torch.utils.checkpoint import checkpoint

import memlog
from memlog.estimates.estimate import _next_size

MIB = 1024**2


def layers(dropout: float = 0.0) -> nn.Module:
    parts = (nn.Linear(256, 256), nn.GELU(), nn.Dropout(dropout))
    return nn.Sequential(*parts, nn.Linear(256, 256))


def step(model: nn.Module, optimizer: torch.optim.Optimizer, batch: int) -> None:
    model(torch.randn(batch, 256)).square().mean().backward()
    optimizer.step()
    optimizer.zero_grad()


def estimated(**changed: Any) -> memlog.Estimate:
    arguments = {"model": layers, "optimizer": torch.optim.AdamW, "batch": 64, "device": "cpu"}
    return memlog.estimate(changed.pop("step", step), **(arguments | changed))


@pytest.mark.parametrize("name", ["gpt", "unet", "rollout", "encoder", "linear-dropout-tanh"])
def test_the_peak_is_the_allocators(name: str) -> None:
    found = estimate_of(CASES[name])
    assert found.peak == pytest.approx(measured_peak(CASES[name]), rel=0.002)


def test_model_and_optimizer_keep_their_tensors_and_state() -> None:
    model = layers()
    optimizer = torch.optim.AdamW(model.parameters())
    step(model, optimizer, 4)
    values = [parameter.clone() for parameter in model.parameters()]
    parameters, states = list(model.parameters()), list(optimizer.state.values())
    found = estimated(model=model, optimizer=optimizer, batch=100_000_000)
    assert found.peak > 10**11
    assert all(a is b for a, b in zip(model.parameters(), parameters, strict=True))
    assert all(a is b for a, b in zip(optimizer.state.values(), states, strict=True))
    assert all(map(torch.equal, model.parameters(), values))
    step(model, optimizer, 4)


def test_nothing_of_the_model_and_the_batch_stays_alive() -> None:
    def estimated() -> list[weakref.ref[torch.Tensor]]:
        model, batch = nn.Linear(8, 8), torch.zeros(4, 8)

        def step(model: nn.Module, batch: torch.Tensor) -> None:
            model(batch).sum().backward()  # and the gradients stay

        memlog.estimate(step, model=model, batch=batch, device="cpu")
        return [weakref.ref(each) for each in (model.weight, batch)]

    held = estimated()
    gc.collect()
    assert [each() for each in held] == [None, None]


def test_the_step_may_use_names_from_around_it() -> None:
    model = layers()
    optimizer = torch.optim.AdamW(model.parameters())
    found = estimated(step=lambda: step(model, optimizer, 64), model=model, optimizer=optimizer)
    assert found.peak == estimated(model=model).peak


def test_a_real_batch_is_resized() -> None:
    def fit(model: nn.Module, optimizer: torch.optim.Optimizer, batch: dict[str, Any]) -> None:
        nn.functional.mse_loss(model(batch["x"]), batch["y"]).backward()
        optimizer.step()
        optimizer.zero_grad()

    def batch(size: int) -> dict[str, Any]:
        return {"x": torch.randn(size, 256), "y": torch.randn(size, 256), "w": torch.ones(())}

    found = estimated(step=fit, batch=batch(8))
    assert found.batch == 8
    assert found.with_batch(4096).peak == estimated(step=fit, batch=batch(4096)).peak > found.peak


def test_the_largest_batch_fits_and_one_more_does_not() -> None:
    found = estimated()
    largest = found.largest_batch("64 MiB")
    assert found.with_batch(largest).fits("64 MiB")
    assert not found.with_batch(largest + 1).fits("64 MiB")
    assert found.largest_batch("1 MiB") == 0
    assert _next_size({64: 10, 32: 10}, 5, fitting=0, too_large=32) == 16


def test_checkpointing_accumulation_and_autocast_lower_the_peak() -> None:
    model = nn.Sequential(*(layers() for _ in range(4)))

    def checkpointed(optimizer: torch.optim.Optimizer, batch: int) -> None:
        out = torch.randn(batch, 256)
        for block in model:
            out = checkpoint(block, out, use_reentrant=False)
        out.square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()

    def accumulated(model: nn.Module, optimizer: torch.optim.Optimizer, batch: int) -> None:
        for _ in range(4):
            model(torch.randn(batch // 4, 256)).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()

    whole = estimated(model=model, batch=8192).peak
    assert estimated(step=checkpointed, model=model, batch=8192).peak < 0.6 * whole
    assert estimated(step=accumulated, model=model, batch=8192).peak < 0.5 * whole


def test_on_cuda_dropout_keeps_a_byte_a_value() -> None:
    def drop() -> None:
        nn.functional.dropout(torch.randn(MIB, requires_grad=True)).sum().backward()

    on_cpu, on_cuda = (memlog.estimate(drop, device=device).peak for device in ("cpu", "cuda"))
    assert on_cpu - on_cuda >= 2 * MIB


def test_on_cuda_autocast_computes_sums_in_float32() -> None:
    def forward(model: nn.Module, batch: int) -> None:
        with torch.autocast("cuda", dtype=torch.bfloat16):
            out = model(torch.randn(batch, 256, device="cuda"))
            assert (out.dtype, out.exp().dtype) == (torch.bfloat16, torch.float32)
        out.sum().backward()

    assert estimated(step=forward, optimizer=None, device="cuda").peak > 0
    assert not torch.is_autocast_enabled("cpu")


def test_fused_attention_keeps_no_matrix_of_scores() -> None:
    def attend() -> None:
        query = torch.randn(2, 4, 2048, 16, requires_grad=True)
        mask = torch.ones(2048, 2048, dtype=torch.bool).tril()
        out = nn.functional.scaled_dot_product_attention(
            query, query, query, attn_mask=mask, dropout_p=0.1
        )
        out.sum().backward()

    assert memlog.estimate(attend, device="cuda").peak < 40 * MIB


def test_what_cuda_needs_besides_tensors_is_a_range_with_its_source() -> None:
    found = estimated(device="cuda")
    assert found.reserved is not None
    assert found.reserved >= found.peak
    assert all(each.low < each.high and each.source for each in found.besides)
    assert found.needed > found.reserved + sum(each.high for each in found.besides)
    assert found.fits("80 GiB")
    assert not found.fits("512 MiB")


def test_values_may_be_printed_but_not_decided_by(capsys: pytest.CaptureFixture[str]) -> None:
    def prints(model: nn.Module, batch: int) -> None:
        loss = model(torch.randn(batch, 256)).square().mean()
        loss.backward()
        print(f"{loss:.3f} {loss.item() / 2:.1f}")

    def decides(model: nn.Module, batch: int) -> None:
        loss = model(torch.randn(batch, 256)).square().mean()
        if loss.item() > 1:
            loss.backward()

    def converts(model: nn.Module, batch: int) -> None:
        print("%.3f" % model(torch.randn(batch, 256)).square().mean())  # noqa: UP031 - some write it so

    estimated(step=prints, optimizer=None)
    assert "0.5" in capsys.readouterr().out
    with pytest.raises(
        memlog.ConfigurationError, match=r"\.py, line \d+: this line decides by a"
    ) as told:
        estimated(step=decides, optimizer=None)
    assert "item()" not in str(told.value)  # the line has it already
    with pytest.raises(
        memlog.ConfigurationError, match=r"\.py, line \d+: .* write loss\.item\(\) to print"
    ):
        estimated(step=converts, optimizer=None)


def test_a_refusal_says_what_the_line_does() -> None:
    def array(model: nn.Module) -> None:
        model(torch.randn(4, 8)).detach().numpy()

    def sampled(model: nn.Module) -> None:
        torch.distributions.Categorical(logits=model(torch.randn(4, 8)), validate_args=True)

    def make() -> nn.Module:
        return nn.Linear(8, 8)

    with pytest.raises(memlog.ConfigurationError, match=r"\.py, line \d+: the step makes a NumPy"):
        memlog.estimate(array, model=make)
    with pytest.raises(
        memlog.ConfigurationError, match=r"torch\.distributions\.categorical.* validate_args=False"
    ):
        memlog.estimate(sampled, model=make)


DISTRIBUTED = """
    import sys
    import torch
    import torch.distributed as dist
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard
    from torch.nn.parallel import DistributedDataParallel
    import memlog

    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)

    def made():
        model = torch.nn.Linear(8, 8)
        if sys.argv[1] == "replicated":
            return DistributedDataParallel(model)
        return fully_shard(model, mesh=init_device_mesh("cpu", (1,)))

    def step(model):
        model(torch.randn(4, 8)).sum().backward()

    for model in (made, made()):
        try:
            memlog.estimate(step, model=model)
        except memlog.ConfigurationError as error:
            print(error)
    dist.destroy_process_group()
"""


@pytest.mark.parametrize(
    ("kind", "remedy"),
    [
        ("replicated", "estimate the model without it (its attribute `module`)"),
        ("sharded", "estimate the model without them, which gives the memory without sharding"),
    ],
)
def test_models_of_several_processes_are_refused_with_a_remedy(
    tmp_path: Path, kind: str, remedy: str
) -> None:
    lines = child.run(DISTRIBUTED, tmp_path, kind).splitlines()
    assert [remedy in line for line in lines] == [True, True]


@pytest.mark.parametrize("device", ["cpu", "cuda"])
def test_a_scaler_steps_its_optimizer_and_keeps_its_own_state(device: str) -> None:
    scaler = torch.amp.GradScaler("cpu")
    before = dict(vars(scaler))

    def plain(model: nn.Module, optimizer: Any) -> None:
        model(torch.randn(4, 256)).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()

    def scaled(model: nn.Module, optimizer: Any) -> None:
        scaler.scale(model(torch.randn(4, 256)).square().mean()).backward()
        scaler.unscale_(optimizer)
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()

    def peak(step: Any) -> Any:
        return memlog.estimate(
            step, model=lambda: nn.Linear(256, 256), optimizer=torch.optim.Adam, device=device
        )

    assert peak(scaled).categories["optimizer state"] == peak(plain).categories["optimizer state"]
    assert peak(scaled).peak == pytest.approx(peak(plain).peak, rel=0.01)
    assert vars(scaler) == before
    model = nn.Linear(256, 256)
    scaled(model, torch.optim.Adam(model.parameters()))  # as if there had been no estimate


def test_a_step_without_backward_or_the_optimizer_is_named() -> None:
    def forward(model: nn.Module) -> None:
        model(torch.randn(4, 8)).sum()

    def backward(model: nn.Module) -> None:
        model(torch.randn(4, 8)).sum().backward()

    def without(step: Any, optimizer: Any) -> str:
        made = memlog.estimate(
            step, model=lambda: nn.Linear(8, 8), optimizer=optimizer, device="cpu"
        )
        return made.without

    assert without(forward, torch.optim.Adam) == "gradients; the optimizer's state"
    assert without(backward, torch.optim.Adam) == "the optimizer's state"
    assert without(forward, None) == ""  # an evaluation


@pytest.mark.parametrize("device", ["cpu", "cuda"])
@pytest.mark.parametrize(
    ("calls", "without"),
    [
        ((), "gradients; the optimizer's state"),
        (("backward",), "the optimizer's state"),
        (("backward", "step"), ""),
    ],
)
def test_a_step_that_makes_its_optimizer_is_told_what_is_not_counted(
    calls: tuple[str, ...], without: str, device: str
) -> None:
    def step() -> None:
        model = nn.Linear(8, 8)
        optimizer = torch.optim.Adam(model.parameters())
        loss = model(torch.randn(4, 8)).sum()
        if "backward" in calls:
            loss.backward()
        if "step" in calls:
            optimizer.step()

    assert memlog.estimate(step, device=device).without == without


@pytest.mark.parametrize("device", ["cpu", "cuda"])
def test_a_step_that_calls_the_model_on_other_threads_is_refused(device: str) -> None:
    def step(model: nn.Module, batch: int) -> None:
        with ThreadPoolExecutor(2, "halves") as pool:
            halves = pool.map(lambda _: model(torch.randn(batch // 2, 64)).sum(), range(2))
            sum(halves).backward()

    with pytest.raises(
        memlog.ConfigurationError, match=r"on another thread .halves_[01].*: call the"
    ):
        memlog.estimate(step, model=nn.Linear(64, 64), batch=8, device=device)


def test_what_torch_can_not_do_on_fake_tensors_is_refused_with_a_remedy() -> None:
    def closed(model: nn.Module, optimizer: Any) -> None:
        def closure() -> torch.Tensor:
            loss = model(torch.randn(4, 8)).sum()
            loss.backward()
            return loss

        optimizer.step(closure)

    def mapped(model: nn.Module) -> None:
        def loss(parameters: dict[str, torch.Tensor], one: torch.Tensor) -> torch.Tensor:
            found: torch.Tensor = torch.func.functional_call(model, parameters, (one,))
            return found.sum()

        parameters = dict(model.named_parameters())
        torch.func.vmap(torch.func.grad(loss), (None, 0))(parameters, torch.randn(4, 8))

    def make() -> nn.Module:
        return nn.Linear(8, 8)

    with pytest.raises(memlog.ConfigurationError, match="leave capturable=True out"):
        memlog.estimate(
            closed, model=make, optimizer=lambda them: torch.optim.AdamW(them, capturable=True)
        )
    with pytest.raises(memlog.ConfigurationError, match=r"torch\.func\.vmap .* leave them out"):
        memlog.estimate(mapped, model=make)


def test_an_operation_that_depends_on_values_is_refused_by_name() -> None:
    def selects(model: nn.Module, batch: int) -> None:
        out = model(torch.randn(batch, 256))
        out[out > 0].sum().backward()

    with pytest.raises(
        memlog.ConfigurationError, match=r"the operation aten\.\S+ depends on .* torch\.where"
    ):
        estimated(step=selects, optimizer=None)


def test_an_operation_that_torch_would_run_on_large_real_tensors_is_refused_by_name() -> None:
    def pooled(rows: int) -> None:
        volumes = torch.randn(rows, 16, 20, 20, 20, requires_grad=True)
        nn.functional.fractional_max_pool3d(volumes, 2, output_size=5).sum().backward()

    with pytest.raises(memlog.ConfigurationError, match=r"test_estimate.py.*fractional_max_pool3d"):
        memlog.estimate(lambda: pooled(64))
    assert memlog.estimate(lambda: pooled(2)).peak


@pytest.mark.parametrize("device", ["cpu", "cuda"])
@pytest.mark.parametrize("kind", [list, tuple])
def test_several_optimizers_count_together(device: str, kind: type) -> None:
    maker, judge = nn.Linear(64, 64), nn.Linear(64, 1)
    adam, sgd = torch.optim.AdamW(maker.parameters()), torch.optim.SGD(judge.parameters(), 0.1)

    def compete(optimizer: Sequence[torch.optim.Optimizer], batch: int) -> None:
        judge(maker(torch.randn(batch, 64))).sum().backward()
        for each in optimizer:
            each.step()
            each.zero_grad()

    models = nn.ModuleList([maker, judge])
    found = memlog.estimate(
        compete, model=models, optimizer=kind([adam, sgd]), batch=8, device=device
    )
    weights = sum(each.nbytes for each in maker.parameters())
    assert 2 * weights <= found.categories["optimizer state"] <= 2 * weights + 8
    assert not adam.state
    assert not isinstance(maker.weight, FakeTensor)
    with pytest.raises(memlog.ConfigurationError, match="a part is no optimizer"):
        memlog.estimate(compete, model=models, optimizer=[adam, torch.optim.SGD], batch=8)


def test_recurrent_layers_are_named_also_if_the_step_has_them() -> None:
    layer, name = nn.LSTM(8, 8), "what cuDNN keeps for recurrent layers"
    outside = memlog.estimate(lambda: layer(torch.randn(5, 4, 8)), model=layer, device="H100")
    assert outside.without == name
    made = memlog.estimate(lambda: nn.LSTM(8, 8)(torch.randn(5, 4, 8)), device="H100")
    assert made.without == name
    assert not memlog.estimate(lambda: nn.GRUCell(8, 8)(torch.randn(4, 8)), device="H100").without


def test_what_is_not_counted_stands_beside_what_is_needed() -> None:
    def convolves(model: nn.Module) -> None:
        model(torch.randn(8, 1, 16)).sum().backward()

    found = memlog.estimate(convolves, model=nn.Conv1d(1, 8, 3), device="H100")
    assert found.fits("80 GiB")
    assert found.without == "cuDNN's workspaces"
    [needed] = [line for line in found.text().splitlines() if line.startswith("needed")]
    assert needed.endswith(", not counting cuDNN's workspaces")
    assert "not counting cuDNN's workspaces" in repr(found)
    assert not estimated(device="H100").without


@pytest.mark.parametrize("device", ["cpu", "cuda"])
def test_margin_losses_are_estimated_in_any_size(device: str) -> None:
    def margins(rows: int) -> None:
        out = torch.randn(rows, 500, requires_grad=True)
        classes = torch.zeros(rows, 500, dtype=torch.int64)
        loss = nn.functional.multilabel_margin_loss(out, classes)
        (loss + nn.functional.multi_margin_loss(out, classes[:, 0])).backward()

    assert memlog.estimate(lambda: margins(100_000), device=device).peak > 1e9


def test_a_wrong_argument_is_one_clear_line() -> None:
    with pytest.raises(memlog.ConfigurationError, match="asks for 'data'"):
        estimated(step=lambda data: data)
    with pytest.raises(memlog.ConfigurationError, match="write 'cuda' or 'cpu'"):
        estimated(device="tpu")
    for wrong, message in [
        ({"batch": 0}, "write a whole number above 0"),
        ({"batch": "8"}, "write a whole number above 0"),
        ({"batch": None}, "pass batch= to memlog.estimate"),
        ({"optimizer": None}, "pass optimizer= to memlog.estimate"),
        ({"model": "gpt2"}, "pass a torch.nn.Module"),
        ({"optimizer": lambda _: None}, "function that returns None: pass a torch.optim.Optimizer"),
    ]:
        with pytest.raises(memlog.ConfigurationError, match=message):
            estimated(**wrong)
    with pytest.raises(memlog.ConfigurationError, match="needs no more memory than a small one"):
        estimated(step=lambda model: model(torch.randn(4, 256))).largest_batch("2 GiB")
    with pytest.raises(memlog.ConfigurationError, match="pass batch="):
        estimated(
            step=lambda model: model(torch.randn(4, 256)).sum().backward(), batch=None
        ).with_batch(2)


class Sign(torch.autograd.Function):
    """Function that keeps a mask of booleans. Its backward pass multiplies the gradient by the mask."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        ctx.mask = x.abs() < 1
        return x.sign()

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> torch.Tensor:
        return gradient * ctx.mask


class Signed(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(256, 512), nn.Linear(512, 256)
        self.scale = torch.ones(512, 512)  # neither a parameter nor a buffer

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        image = (Sign.apply(self.first(x)) @ self.scale).view(-1, 2, 16, 16)
        columns = nn.functional.unfold(image, 3, padding=1)
        return self.last(nn.functional.fold(columns, 16, 3, padding=1).flatten(1))


def test_tensors_that_the_program_keeps_and_casts_inside_operations_are_counted() -> None:
    case = Case(Signed, lambda batch: torch.randn(batch, 256), lambda out: out.mean(), 512)
    real = measured_peak(case)
    for model in (Signed, Signed()):
        assert estimate_of(case, model).peak == pytest.approx(real, rel=0.002)


@pytest.mark.parametrize(
    "loss",
    [
        lambda out: nn.functional.mse_loss(out, torch.zeros_like(out)),
        lambda out: out.sigmoid().sum(),
    ],
    ids=["what a mean loss keeps", "what a normalisation's backward pass takes"],
)
def test_bytes_that_no_shape_shows_are_counted(loss: Any) -> None:
    def model() -> nn.Module:
        return nn.Sequential(nn.BatchNorm2d(8), nn.ReLU(), nn.BatchNorm2d(8))

    case = Case(model, lambda batch: torch.randn(batch, 8, 16, 16), loss, 16)
    assert estimate_of(case).peak == pytest.approx(measured_peak(case), rel=0.002)


def test_a_copy_of_the_model_that_a_step_keeps_is_counted() -> None:
    kept: list[Any] = []

    def made() -> nn.Module:
        model = layers()
        kept[:] = [torch.optim.swa_utils.AveragedModel(model)]
        return model

    def averages(model: nn.Module, optimizer: torch.optim.Optimizer, batch: int) -> None:
        step(model, optimizer, batch)
        kept[0].update_parameters(model)

    parameters = sum(each.nbytes for each in layers().parameters())
    more = estimated(step=averages, model=made).peak - estimated().peak
    assert more == pytest.approx(parameters, abs=64)


def test_programs_may_name_cuda_devices_and_convert_the_model() -> None:
    device = torch.device("cuda", 0)

    def named(model: nn.Module, optimizer: torch.optim.Optimizer, batch: int) -> None:
        inputs = torch.randn(batch, 256).bfloat16().pin_memory().to(device, non_blocking=True)
        model(inputs).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
        torch.cuda.synchronize()

    whole = estimated(device="cuda").peak
    assert estimated(step=named, model=lambda: layers().to("cuda").bfloat16()).peak < 0.6 * whole


@pytest.mark.parametrize(
    "kind", [torch.optim.NAdam, torch.optim.RAdam, torch.optim.Adagrad, torch.optim.ASGD]
)
def test_optimizers_may_read_their_own_step(kind: Any) -> None:
    assert estimated(optimizer=kind).categories["optimizer state"] > 0


@pytest.mark.filterwarnings("ignore:`torch.jit:DeprecationWarning")
def test_what_an_estimate_would_get_wrong_is_refused() -> None:
    model = layers()
    optimizer = torch.optim.AdamW(model.parameters())
    hooked = layers()
    next(hooked.parameters()).register_post_accumulate_grad_hook(print)
    for changed, message in [
        ({"model": None, "optimizer": None}, "pass model="),
        ({"model": None, "optimizer": optimizer}, "pass model="),
        ({"model": model, "optimizer": None}, "pass optimizer="),
        ({"model": hooked, "step": step}, "parameter has hooks"),
        (
            {"model": torch.compile(model), "step": step, "device": "cuda"},
            r"without torch\.compile",
        ),
    ]:
        around: dict[str, Any] = {"step": lambda: step(model, optimizer, 64)} | changed
        with pytest.raises(memlog.ConfigurationError, match=message):
            estimated(**around)
    assert not optimizer.state
    assert all(each.grad is None for each in model.parameters())


def test_the_flame_graph_opens_in_speedscope(tmp_path: Path) -> None:
    file = estimated().export_flame_graph(tmp_path / "step.speedscope.json")
    assert json.loads(file.read_text())["$schema"].endswith("file-format-schema.json")


def test_a_step_without_its_model_is_one_error(caplog: pytest.LogCaptureFixture) -> None:
    model = nn.Linear(8, 8)
    with pytest.raises(memlog.ConfigurationError, match="pass model="):
        memlog.estimate(lambda: model(torch.randn(4, 8)).sum().backward())
    assert caplog.records == []

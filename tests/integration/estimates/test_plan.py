"""Plans: the cheapest changes with which a step fits, in code that a reader can paste."""

from __future__ import annotations

import json
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from click.testing import CliRunner
from support.models import GPT
from torch import nn
from torch.distributed.fsdp import CPUOffloadPolicy, OffloadPolicy, fully_shard
from torch.utils.checkpoint import checkpoint

import memlog
from memlog.cli.main import cli
from memlog.errors import ConfigurationError
from memlog.estimates.estimate import estimate_made_by
from memlog.estimates.plan import ADAFACTOR, StepChanges, plan

pytestmark = [
    pytest.mark.integration,
    pytest.mark.filterwarnings("ignore:FSDP2-wrapped module"),
]
BATCH, LENGTH = 16, 64


def gpt() -> nn.Module:
    return GPT(width=128, blocks=3)


def loss_of(model: nn.Module, batch: int) -> torch.Tensor:
    return model(torch.randint(40, (batch, LENGTH), device="cuda")).square().mean()  # type: ignore[no-any-return]


def step(model: nn.Module, optimizer: torch.optim.Optimizer, batch: int) -> None:
    optimizer.zero_grad()
    loss_of(model, batch).backward()
    optimizer.step()


def job(batch: int) -> dict[str, Any]:
    model = gpt().to("cuda")
    optimizer = torch.optim.AdamW(model.parameters())
    return {"step": partial(step, model, optimizer, batch), "model": model, "optimizer": optimizer}


@pytest.fixture(scope="module")
def whole() -> memlog.Estimate:
    return memlog.estimate(step, model=gpt, optimizer=torch.optim.AdamW, batch=BATCH)


def changed_by_hand(changes: StepChanges) -> dict[str, Any]:
    """Return the job with changes as a program makes them."""
    model = gpt().to("cuda")
    for path in changes.checkpointed:
        module = model.get_submodule(path)
        module.forward = partial(checkpoint, module.forward, use_reentrant=False)
    if changes.sharded is not None:
        policy = CPUOffloadPolicy() if changes.parameters_on_host else OffloadPolicy()
        for path in changes.sharded:
            fully_shard(model.get_submodule(path), offload_policy=policy)
        fully_shard(model, offload_policy=policy)
    options: dict[str, Any] = {"foreach": False} if changes.one_by_one else {}
    kind: Any = torch.optim.Adafactor if changes.optimizer else torch.optim.AdamW
    optimizer = kind(model.parameters(), **options)

    def train() -> None:
        optimizer.zero_grad()
        for _ in range(min(changes.parts, 3)):
            with (
                torch.autocast("cuda", dtype=torch.bfloat16, enabled=changes.autocast),
                torch.autograd.graph.saved_tensors_hooks(
                    *((torch.Tensor.cpu, torch.Tensor.cuda) if changes.on_host else (_same, _same))
                ),
            ):
                loss = loss_of(model, BATCH // changes.parts)
            loss.backward()
            del loss
        optimizer.step()

    return {"step": train, "model": model, "optimizer": optimizer}


def _same(tensor: torch.Tensor) -> torch.Tensor:
    return tensor


BLOCKS = tuple(f"blocks.{number}" for number in range(3))


@pytest.mark.parametrize(
    "changes",
    [
        StepChanges(parts=4),
        StepChanges(checkpointed=BLOCKS),
        StepChanges(checkpointed=BLOCKS[::2], parts=2),
        StepChanges(autocast=True),
        StepChanges(one_by_one=True),
        StepChanges(on_host=True),
        StepChanges(parts=8, checkpointed=BLOCKS, autocast=True, one_by_one=True),
        StepChanges(optimizer=ADAFACTOR, parts=2),
        StepChanges(sharded=BLOCKS),
        StepChanges(sharded=BLOCKS, parameters_on_host=True),
        StepChanges(sharded=(), parts=2, autocast=True, checkpointed=BLOCKS),
    ],
    ids=str,
)
def test_changes_are_estimated_as_if_the_program_had_made_them(changes: StepChanges) -> None:
    ranks = None if changes.sharded is None else 8
    by_hand = estimate_made_by(lambda: changed_by_hand(changes), ranks=ranks)
    found = estimate_made_by(lambda: job(BATCH // changes.parts), changes=changes, ranks=ranks)
    assert found.peak == pytest.approx(by_hand.peak, rel=0.001)


def test_the_fewest_parts_that_fit_are_planned(whole: memlog.Estimate) -> None:
    assert whole.plan(whole.needed + 2**20).parts == 1
    of_four = whole.with_batch(BATCH // 4)
    found = whole.plan(of_four.needed + 4 * 2**20)
    assert found.fits
    assert (found.parts, found.checkpointed, found.autocast) == (4, (), False)
    first, last = found.steps
    assert (first.change, last.change) == (
        "a batch of 16",
        "+ gradient accumulation: 4 parts of 4",
    )
    assert (first.fits, last.fits) == (False, True)
    assert last.needed <= found.memory
    assert "for part in batch.chunk(4):" in found.code


def test_a_batch_that_cannot_be_divided_is_checkpointed_or_computed_in_bfloat16() -> None:
    whole = memlog.estimate(partial(step, batch=BATCH), model=gpt, optimizer=torch.optim.AdamW)
    asked: list[StepChanges] = []

    def ask(changes: StepChanges) -> memlog.Estimate:
        asked.append(changes)
        return estimate_made_by(lambda: job(BATCH), changes=changes)

    strongest = ask(StepChanges(checkpointed=BLOCKS, autocast=True, one_by_one=True))
    found = plan(ask, strongest.needed + 2**20)
    assert found.fits
    assert found.parts == 1
    assert not found.on_host
    assert found.checkpointed
    assert found.operations > 0.05
    assert "module.forward = partial(checkpoint, module.forward" in found.code
    assert len(asked) < 20
    assert whole.plan(whole.needed + 2**20).steps[0].change == "as it is"


def test_changes_that_a_model_cannot_make_are_left_out() -> None:
    def ask(changes: StepChanges) -> memlog.Estimate:
        if changes.checkpointed:
            raise ConfigurationError("these modules can't run twice")
        return estimate_made_by(lambda: job(BATCH // changes.parts), changes=changes)

    found = plan(ask, 100 * 2**20)
    assert not found.fits
    assert not found.checkpointed
    of_autocast = ask(StepChanges(autocast=True))
    assert plan(ask, of_autocast.needed + 2**20).fits


def test_what_cannot_fit_is_told_with_all_changes(whole: memlog.Estimate) -> None:
    found = whole.plan("100 MiB")
    assert not found.fits
    assert not found.code
    assert found.steps[-1].change == "+ torch.optim.Adafactor() as the optimizer"
    assert "a plan also shards the model" in found.text()


def test_several_ranks_shard_what_does_not_fit_on_one() -> None:
    wide = partial(GPT, width=512, blocks=3)

    def ask(changes: StepChanges) -> memlog.Estimate:
        def job() -> dict[str, Any]:
            model = wide().to("cuda")
            optimizer = torch.optim.AdamW(model.parameters())
            return {
                "step": partial(step, model, optimizer, 1),
                "model": model,
                "optimizer": optimizer,
            }

        return estimate_made_by(job, ranks=8, changes=changes)

    sharded = ask(StepChanges(sharded=BLOCKS))
    found = plan(ask, sharded.needed + 2**20)
    assert found.fits
    assert found.sharded == BLOCKS
    assert not found.parameters_on_host
    assert found.moved == 3 * 7 / 8 * sum(one.nbytes for one in wide().parameters())
    assert "fully_shard(model.get_submodule(path))" in found.code
    assert "torchrun --nproc-per-node 8" in found.code
    most = plan(ask, 2**20)
    assert not most.fits
    assert most.parameters_on_host
    assert most.host > 2**20
    assert "more devices" in most.text()


def test_a_model_that_is_distributed_already_is_not_sharded_again() -> None:
    def ask(changes: StepChanges) -> memlog.Estimate:
        def job() -> dict[str, Any]:
            model = gpt().to("cuda")
            fully_shard(model)
            optimizer = torch.optim.AdamW(model.parameters())
            return {
                "step": partial(step, model, optimizer, BATCH // changes.parts),
                "model": model,
                "optimizer": optimizer,
            }

        return estimate_made_by(job, batch=BATCH // changes.parts, ranks=2, changes=changes)

    with pytest.raises(ConfigurationError, match="distributed already"):
        ask(StepChanges(sharded=()))
    found = plan(ask, ask(StepChanges(parts=4)).needed + 2**20)
    assert found.fits
    assert found.sharded is None
    assert found.parts > 1


def test_a_batch_norm_keeps_two_samples_in_each_part() -> None:
    def make() -> nn.Module:
        return nn.Sequential(nn.Linear(256, 4096), nn.BatchNorm1d(4096), nn.ReLU())

    def train(model: nn.Module, optimizer: torch.optim.Optimizer, batch: int) -> None:
        model(torch.randn(batch, 256)).mean().backward()
        optimizer.step()

    whole = memlog.estimate(train, model=make, optimizer=torch.optim.SGD, batch=4096)
    found = whole.plan(whole.with_batch(2).needed + 4 * 2**20)
    assert found.fits
    assert 1 < found.parts <= 2048


JOB = """
import torch
from torch import nn

def job(batch):
    model = nn.Sequential(nn.Linear(1024, 1024), nn.GELU(), nn.Linear(1024, 1024))
    optimizer = torch.optim.SGD(model.parameters())
    def step():
        model(torch.randn(batch, 1024)).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
    return {"step": step, "model": model, "optimizer": optimizer}
"""


def test_the_command_prints_the_plan(tmp_path: Path) -> None:
    script = tmp_path / "job.py"
    script.write_text(JOB)
    command = ["estimate", f"{script}:job", "--batch"]
    [row] = json.loads(CliRunner().invoke(cli, [*command, "4096", "--json"]).output)["steps"]
    size = f"{row['needed'] // 2**20 + 4} MiB"
    command += ["8192"]
    shown = CliRunner().invoke(cli, [*command, "--fit", size])
    assert shown.exit_code == 0, shown.output
    assert "+ gradient accumulation: 2 parts of 4,096" in shown.output
    assert "(loss / 2).backward()" in shown.output
    found = CliRunner().invoke(cli, [*command, "--fit", "640 MiB", "--json"])
    assert (found.exit_code, json.loads(found.output)["plan"]["fits"]) == (1, False)


@pytest.mark.parametrize(
    ("options", "remedy"),
    [
        (["--cpu"], "leave out --cpu"),
        (["--batch", "8,16"], "write one batch size"),
    ],
)
def test_what_has_no_plan_is_refused_with_a_remedy(
    options: list[str], remedy: str, tmp_path: Path
) -> None:
    script = tmp_path / "job.py"
    script.write_text("def job(batch): ...\n")
    shown = CliRunner().invoke(cli, ["estimate", f"{script}:job", *options, "--fit", "8 GiB"])
    assert shown.exit_code == 2
    assert remedy in shown.output

"""Plans, applied by hand to real trainings: the peak that PyTorch's allocator then counts."""

from __future__ import annotations

import gc
from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import pytest
import torch
import torch.distributed as dist
from support.models import GPT, UNet
from support.training import step_with
from torch import Tensor, nn
from torch.distributed.fsdp import CPUOffloadPolicy, OffloadPolicy, fully_shard
from torch.testing._internal.distributed.fake_pg import FakeStore

import memlog
from memlog.estimates.estimate import Estimate, estimate_made_by
from memlog.estimates.plan import StepChanges
from memlog.estimates.plan import plan as planned
from memlog.trace.predict.fitting import FittingPlan

pytestmark = pytest.mark.cuda
BATCH = 16


class Job(NamedTuple):
    model: Callable[[], nn.Module]
    inputs: Callable[[int], Tensor]

    def step(self, model: nn.Module, optimizer: torch.optim.Optimizer, batch: int) -> None:
        model(self.inputs(batch)).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()

    def changed(self, plan: FittingPlan) -> Callable[[], None]:
        """Return the step with a plan's changes, as its code makes them."""
        model = self.model().to("cuda")
        if plan.sharded is not None:
            policy = CPUOffloadPolicy() if plan.parameters_on_host else OffloadPolicy()
            for path in (*plan.sharded, ""):
                fully_shard(model.get_submodule(path), offload_policy=policy)
        options: dict[str, Any] = {"foreach": False} if plan.one_by_one else {}
        kind: Any = torch.optim.Adafactor if plan.optimizer else torch.optim.AdamW
        optimizer = kind(model.parameters(), **options)
        return step_with(
            plan,
            model,
            optimizer,
            lambda: [BATCH // plan.parts] * plan.parts,
            lambda size: model(self.inputs(size)).square().mean(),
        )


JOBS = {
    "GPT": Job(
        lambda: GPT(width=256, blocks=3),
        lambda batch: torch.randint(40, (batch, 64), device="cuda"),
    ),
    "UNet": Job(UNet, lambda batch: torch.randn(batch, 2, 64, 64, device="cuda")),
    "layers": Job(
        lambda: nn.Sequential(
            *(nn.Sequential(nn.Linear(512, 512), nn.GELU()) for _ in range(6)),
        ),
        lambda batch: torch.randn(64 * batch, 512, device="cuda"),
    ),
}


@pytest.mark.parametrize("share", [0.5, 0.05])
@pytest.mark.parametrize("name", JOBS)
def test_a_plan_that_is_applied_fits_and_takes_what_it_says(name: str, share: float) -> None:
    """``share``: how much of what all changes together save may stay."""
    job = JOBS[name]
    whole = memlog.estimate(job.step, model=job.model, optimizer=torch.optim.AdamW, batch=BATCH)
    least = whole.plan("1 MiB").steps[-1].needed
    plan = whole.plan(f"{(least + share * (whole.needed - least)) // 1024} KiB")
    assert plan.fits
    check_applied(job, plan, whole, reserved=1.02)


def check_applied(job: Job, plan: FittingPlan, whole: Estimate, *, reserved: float) -> None:
    torch._C._cuda_clearCublasWorkspaces()
    gc.collect()
    torch.cuda.empty_cache()
    torch.cuda.reset_peak_memory_stats()
    assert not torch.cuda.memory_allocated()
    step = job.changed(plan)
    for _ in range(3):
        step()
    assert torch.cuda.max_memory_allocated() == pytest.approx(plan.steps[-1].peak, rel=0.01)
    context = sum(each.high for each in whole.besides)
    assert torch.cuda.max_memory_reserved() <= reserved * (plan.memory - context)


@pytest.mark.filterwarnings("ignore:FSDP2-wrapped module")
@pytest.mark.parametrize("name", ["GPT", "layers"])
def test_a_plan_for_eight_ranks_that_is_applied_fits(name: str) -> None:
    job = JOBS[name]

    def ask(changes: StepChanges) -> Estimate:
        def made() -> dict[str, Any]:
            model = job.model().to("cuda")
            optimizer = torch.optim.AdamW(model.parameters())
            step = partial(job.step, model, optimizer, BATCH // changes.parts)
            return {"step": step, "model": model, "optimizer": optimizer}

        return estimate_made_by(made, ranks=8, changes=changes)

    whole = ask(StepChanges())
    least = planned(ask, 2**20).steps[-1].needed
    plan = planned(ask, int(least + 0.05 * (whole.needed - least)))
    assert plan.fits
    dist.init_process_group("fake", rank=0, world_size=8, store=FakeStore())
    try:
        # The streams of collectives have pools of their own, which an estimate knows within 6 %.
        check_applied(job, plan, whole, reserved=1.06)
    finally:
        dist.destroy_process_group()

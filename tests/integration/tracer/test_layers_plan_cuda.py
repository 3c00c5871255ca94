"""Plans for a run on a device, applied by hand: the peak that PyTorch's allocator then counts."""

from __future__ import annotations

import gc

import msgspec
import pytest
import torch
from support.commands import memlog as command
from support.models import GPT
from support.training import step_with

import memlog
from memlog.cli.advise import RunAdvice
from memlog.trace.predict.fitting import FittingPlan, PlannedChanges

pytestmark = [pytest.mark.cuda, pytest.mark.usefixtures("runs")]
BATCH = 16


def train(changes: PlannedChanges, steps: int = 3) -> None:
    model = GPT(width=256, blocks=3).to("cuda")
    batch = torch.randint(40, (BATCH, 64), device="cuda")
    step = step_with(
        changes,
        model,
        torch.optim.AdamW(model.parameters()),
        lambda: batch.chunk(changes.parts),
        lambda part: model(part).square().mean(),
    )
    for _ in range(steps):
        step()


def advice(fit: int) -> RunAdvice:
    result = command("advise", "latest", "--json", "--fit", f"{fit // 1024} KiB")
    found = msgspec.json.decode(result.stdout, type=RunAdvice)
    assert found.fit is not None
    assert result.exit_code == (0 if found.fit.is_enough else 1)
    return found


def planned(fit: int) -> FittingPlan:
    found = advice(fit).fit
    assert found is not None
    assert found.plan is not None
    return found.plan


def test_a_plan_for_a_run_that_is_applied_takes_what_it_says() -> None:
    memlog.init("local", layers=True, budget=0.5)
    train(PlannedChanges(), steps=40)
    memlog.finish()
    whole, least = planned(2**50).steps[0], planned(2**20).steps[-1]
    assert whole.needed > whole.peak  # with what the allocator reserves beside tensors
    for share in (0.8, 0.6, 0.5):
        memory = round(least.needed + share * (whole.needed - least.needed))
        plan = planned(memory)
        assert plan.fits
        assert not plan.autocast  # a device's trace has no types
        assert not plan.optimizer
        torch._C._cuda_clearCublasWorkspaces()
        gc.collect()
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()
        assert not torch.cuda.memory_allocated()
        train(plan)
        measured = torch.cuda.max_memory_allocated()
        assert plan.steps[-1].peak == pytest.approx(measured, rel=0.05)
        assert measured <= memory

"""Searches for a batch size: each failed attempt is counted, with the size that was tried."""

from __future__ import annotations

from pathlib import Path

import pytest
from support.failing import child, only_run

from memlog.reports.postmortem import survived
from memlog.reports.summary import summarize

pytestmark = pytest.mark.integration

ACCELERATE = """
import os, signal, sys
import torch
from accelerate.utils import find_executable_batch_size, memory
import memlog

asking = memory.should_reduce_batch_size
memlog.init("local")
model = torch.nn.Linear(4, 4)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

@find_executable_batch_size(starting_batch_size=512)
def train(batch_size):
    if batch_size > 400:
        torch.empty(2**46)
    for _ in range(2):
        model(torch.randn(batch_size, 4)).sum().backward()
        optimizer.step()

train()
if {killed}:
    os.kill(os.getpid(), signal.SIGKILL)
memlog.finish()
assert memory.should_reduce_batch_size is asking
"""

LIGHTNING = """
import warnings
warnings.simplefilter("ignore")
import lightning.pytorch as pl
import torch
from lightning.pytorch.tuner import Tuner
import memlog

class Model(pl.LightningModule):
    def __init__(self):
        super().__init__()
        self.batch_size, self.layer = 2, torch.nn.Linear(4, 4)
    def training_step(self, batch):
        if len(batch) > 4:
            torch.empty(2**46)
        return self.layer(batch).sum()
    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.1)
    def train_dataloader(self):
        return torch.utils.data.DataLoader(torch.ones(64, 4), batch_size=self.batch_size)

memlog.init("local")
quiet = {"logger": False, "enable_checkpointing": False, "enable_progress_bar": False}
trainer, model = pl.Trainer(max_steps=2, accelerator="cpu", **quiet), Model()
Tuner(trainer).scale_batch_size(model, mode="power", init_val=2, max_trials=4, steps_per_trial=1)
trainer.fit(model)
memlog.finish()
"""


@pytest.mark.parametrize("killed", [False, True])
def test_attempts_of_accelerate_are_counted(tmp_path: Path, killed: bool) -> None:
    process = child(tmp_path, ACCELERATE.replace("{killed}", str(killed)))
    output, errors = process.communicate(timeout=120)
    assert process.returncode == (-9 if killed else 0), output + errors
    summary = summarize(only_run(tmp_path))
    assert summary.survived_failures == 3
    assert summary.survived_batch_sizes == [512, 460, 414]
    text = "3 allocations failed and were survived at step 0, with the batch sizes 512, 460, 414"
    assert survived(summary) == text


def test_attempts_of_lightning_are_counted(tmp_path: Path) -> None:
    process = child(tmp_path, LIGHTNING)
    output, errors = process.communicate(timeout=120)
    assert process.returncode == 0, output + errors
    summary = summarize(only_run(tmp_path))
    assert summary.survived_failures == 1
    assert summary.survived_batch_sizes == [8]

"""A training whose first checkpoint can't fit into the host's memory: the first steps tell it."""

from __future__ import annotations

import os
import sys
from pathlib import Path

import pytest
from support.events import runs_in
from support.launching import launch, write

from memlog.events import Alert, Finding, SavedState
from memlog.probes.machine import host_free

pytestmark = [pytest.mark.integration, pytest.mark.cuda]
TRAINING = """
    import os
    import time

    import lightning.pytorch as pl
    import torch
    from lightning.pytorch.callbacks import ModelCheckpoint

    class Model(pl.LightningModule):
        def __init__(self):
            super().__init__()
            with torch.device("cuda"):  # the simulated device's memory takes nothing until it is written
                self.layers = torch.nn.ModuleList(torch.nn.Linear({width}, {width}) for _ in range(4))

        def training_step(self, batch, number):
            time.sleep(0.5)
            if number == {steps}:
                os._exit(0)  # an ordinary end would copy the model to the host
            for layer in self.layers:
                batch = layer(batch)
            return batch.square().mean()

        def configure_optimizers(self):
            return torch.optim.AdamW(self.parameters(), foreach=False)

    trainer = pl.Trainer(
        max_epochs=1, accelerator="gpu", devices=1, logger=False, enable_progress_bar=False,
        enable_model_summary=False, callbacks=[ModelCheckpoint("saved", every_n_train_steps=500)],
    )
    trainer.fit(Model(), torch.utils.data.DataLoader(torch.ones(1000, 1).expand(1000, {width})))
"""


@pytest.mark.parametrize("share", [1.5, 0.1])
def test_a_checkpoint_that_does_not_fit_is_found_long_before(tmp_path: Path, share: float) -> None:
    size = int(share * (host_free(os.getpid()) or 0))
    width = int((size / 3 / 4 / 4) ** 0.5)
    script = write(tmp_path, TRAINING.format(width=width, steps=20))
    memory = {"FAKE_CUDA_COPY": "4k", "FAKE_CUDA_MEMORY": f"{8 * size // 2**30 + 2}GiB"}
    launch(tmp_path, sys.executable, str(script), **memory)
    [run] = runs_in(tmp_path)
    events = list(run.events())
    [state] = [event for event in events if isinstance(event, SavedState)]
    assert (state.way, state.first_at) == ("lightning", 500)
    assert state.model.device + state.optimizer.device == pytest.approx(size, rel=0.02)
    found = [event for event in events if isinstance(event, Finding)]
    told = [event for event in events if isinstance(event, Alert) and event.is_of_finding]
    if share < 1:
        assert not found
        assert not told
        return
    [finding], [alert] = found, told
    assert finding.kind == "first_checkpoint"
    assert finding.title.startswith("The first checkpoint at step 500 needs ")
    assert finding.title == alert.title.rstrip(".")
    assert finding.step is not None
    assert finding.step < 20

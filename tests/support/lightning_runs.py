"""Training scripts with Lightning's Trainer, and what memlog and the loggers recorded of them."""

from __future__ import annotations

from collections import Counter
from pathlib import Path

from memlog.events import Phase
from memlog.journal import RunDirectory
from support.events import events_in
from support.trainers import mlflow_runs

PREAMBLE = """
    import logging
    import os
    import sys
    import warnings

    import lightning.pytorch as pl
    import mlflow
    import torch
    import wandb
    from lightning.pytorch.callbacks import ModelCheckpoint
    from lightning.pytorch.loggers import CSVLogger, MLFlowLogger, TensorBoardLogger, WandbLogger
    from torch.utils.data import DataLoader

    warnings.simplefilter("ignore")
    logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)
    STORE = f"sqlite:///{os.getcwd()}/mlflow.db"

    def begin(*arguments, **settings):
        if "--plain" not in sys.argv:
            global memlog
            import memlog

            return memlog.init(*arguments, finish_timeout=120, **settings)

    class Model(pl.LightningModule):
        def __init__(self, fail_at=None):
            super().__init__()
            self.layer = torch.nn.Linear(4, 1)
            self.fail_at = fail_at

        def loss_of(self, batch):
            return self.layer(batch.float().expand(4)).square().mean()

        def training_step(self, batch, batch_idx):
            if batch_idx == self.fail_at:
                raise ValueError("on purpose")
            loss = self.loss_of(batch)
            self.log("loss", loss)
            return loss

        def validation_step(self, batch, batch_idx):
            self.log("val_loss", self.loss_of(batch))

        def configure_optimizers(self):
            return torch.optim.SGD(self.parameters(), lr=0.01)

    class Gan(Model):
        automatic_optimization = False

        def training_step(self, batch, batch_idx):
            for optimizer in self.optimizers():
                loss = self.loss_of(batch)
                optimizer.zero_grad()
                self.manual_backward(loss)
                optimizer.step()
            self.log("loss", loss)

        def configure_optimizers(self):
            return [torch.optim.SGD(self.parameters(), lr=0.01) for _ in range(2)]

    def fit(logger, model=None, batches=5, validate=False, **arguments):
        torch.manual_seed(0)
        model = model or Model()
        trainer = pl.Trainer(
            **{
                "max_epochs": 2,
                "logger": logger,
                "log_every_n_steps": 1,
                "enable_checkpointing": False,
                "accelerator": "cpu",
                "enable_progress_bar": False,
                "enable_model_summary": False,
                **arguments,
            }
        )
        trainer.fit(model, DataLoader(range(batches)), DataLoader(range(2)) if validate else None)
        return trainer

    def to_mlflow(name):
        return MLFlowLogger("experiment", run_name=name, tracking_uri=STORE)

    def to_wandb():
        return WandbLogger(project="p", offline=True, settings=wandb.Settings(x_disable_stats=True))
"""


Rows = dict[str, list[tuple[int, float]]]
"""Steps and values of each metric."""


def rows_in(folder: Path) -> dict[str, Rows]:
    found: dict[str, Rows] = {}
    for run in mlflow_runs(folder):
        rows = found.setdefault(run.name, {})
        for name, step, value in run.rows:
            rows.setdefault(name, []).append((step, value))
    return found


def of_user(rows: Rows) -> Rows:
    return {key: values for key, values in rows.items() if not key.startswith("mem")}


def steps_of(rows: Rows, metric: str) -> list[int]:
    return sorted(step for step, _ in rows.get(metric, []))


def phases_of(run: RunDirectory) -> Counter[str]:
    return Counter(event.label for event in events_in(run, Phase))

"""One training with one tool, in a process of its own: ``arms.py ARM SCENARIO STEPS``.

This file runs in the interpreter that has the tool, so it imports nothing else of the benchmark. Each tool is
used as its documentation shows, with its defaults, unless a comment gives the reason for another choice.
"""

from __future__ import annotations

import contextlib
import json
import os
import resource
import signal
import sys
import time
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import Any

import torch

SPIKE_STEP = 60
"""Number of the step that allocates `SPIKE_BYTES` more, and frees them as soon as they are filled."""
SPIKE_BYTES = 512 * 1024**2
KILLED_STEP = 150

Around = Callable[[torch.nn.Module], AbstractContextManager[Any]]


class Training:
    """Steps of about five milliseconds on one thread, with one fault."""

    def __init__(self, scenario: str) -> None:
        torch.set_num_threads(1)
        torch.manual_seed(0)
        self.scenario = scenario
        self.model = torch.nn.Sequential(
            torch.nn.Linear(512, 1024), torch.nn.ReLU(), torch.nn.Linear(1024, 512)
        )
        self.inputs = torch.randn(64, 512)
        self.validation_losses: list[torch.Tensor] = []
        self.begun: list[tuple[float, float]] = []
        """Start of each step: on the clock, and in the process's processor time. Both are seconds."""

    def loss(self, step: int) -> torch.Tensor:
        self.begun.append((time.perf_counter(), time.process_time()))
        if self.scenario == "spike" and step == SPIKE_STEP:
            torch.ones(SPIKE_BYTES // 4)
        if self.scenario == "killed" and step == KILLED_STEP:
            os.kill(os.getpid(), signal.SIGKILL)
        if self.scenario == "leak":  # each loss keeps the graph that made it
            self.validation_losses.append(self.model(self.inputs).square().mean())
        loss: torch.Tensor = self.model(self.inputs).square().mean()
        return loss


def plain(training: Training, steps: int, around: Around = lambda _: nullcontext()) -> None:
    """Train in a loop of PyTorch alone."""
    optimizer = torch.optim.SGD(training.model.parameters(), lr=0.01)
    for step in range(steps):
        with around(training.model):
            training.loss(step).backward()  # type: ignore[no-untyped-call] # torch has no type here
            optimizer.step()
            optimizer.zero_grad()


def memlog(training: Training, steps: int, *backends: str) -> None:
    import memlog

    memlog.init([*backends] or "local")
    plain(training, steps)
    memlog.finish()


def mlflow_metrics(training: Training, steps: int) -> None:
    import mlflow

    mlflow.set_tracking_uri("sqlite:///mlflow.db")
    mlflow.enable_system_metrics_logging()  # type: ignore[no-untyped-call] # it has no types
    with mlflow.start_run():
        plain(training, steps)


def wandb_metrics(training: Training, steps: int) -> None:
    import wandb

    with wandb.init(mode="offline"):
        plain(training, steps)


def stormlog(training: Training, steps: int) -> None:
    from stormlog.cpu_profiler import CPUMemoryTracker
    from stormlog.telemetry_sink import TelemetrySinkConfig

    # Without the sink nothing is on the disk before `export_events`.
    tracker = CPUMemoryTracker(telemetry_sink_config=TelemetrySinkConfig(Path("stormlog")))
    tracker.start_tracking()
    plain(training, steps)
    tracker.stop_tracking()
    tracker.export_events("stormlog.json", "json")


def traceml(training: Training, steps: int) -> None:
    from traceml_ai import init, trace_step

    init()
    plain(training, steps, trace_step)


def lightning(training: Training, steps: int, tool: str = "") -> None:
    """Train with Lightning, alone, with its monitor, or with memlog."""
    import logging
    import warnings

    logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)
    warnings.simplefilter("ignore")
    from lightning.pytorch import LightningModule, Trainer
    from lightning.pytorch.callbacks import DeviceStatsMonitor
    from lightning.pytorch.loggers import CSVLogger

    class Module(LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.model = training.model

        def training_step(self, _batch: Any, batch_idx: int) -> torch.Tensor:
            return training.loss(batch_idx)

        def configure_optimizers(self) -> Any:
            return torch.optim.SGD(self.parameters(), lr=0.01)

    if tool == "memlog":
        import memlog

        memlog.init("local")
    Trainer(
        accelerator="cpu",
        max_epochs=1,
        logger=CSVLogger(".", flush_logs_every_n_steps=1 if tool == "monitor" else 100),
        callbacks=[DeviceStatsMonitor()] if tool == "monitor" else [],
        # A reading per step, as memlog has; the default is one per 50.
        log_every_n_steps=1 if tool == "monitor" else 50,
        enable_progress_bar=False,
        enable_model_summary=False,
        enable_checkpointing=False,
    ).fit(Module(), torch.utils.data.DataLoader(range(steps)))  # type: ignore[arg-type] # it works


def composer(training: Training, steps: int, tool: str = "") -> None:
    """Train with Composer, alone or with its monitors."""
    from composer import Trainer
    from composer.callbacks import MemoryMonitor, SystemMetricsMonitor
    from composer.loggers import FileLogger
    from composer.models import ComposerModel

    class Model(ComposerModel):  # type: ignore[misc] # its base may not be installed
        def __init__(self) -> None:
            super().__init__()
            self.model = training.model
            self.step = -1

        def forward(self, _batch: Any) -> torch.Tensor:
            self.step += 1
            return training.loss(self.step)

        def loss(self, outputs: Any, _batch: Any) -> torch.Tensor:
            taken: torch.Tensor = outputs
            return taken

    model = Model()
    Trainer(
        model=model,
        train_dataloader=torch.utils.data.DataLoader(range(steps)),  # type: ignore[arg-type] # it works
        optimizers=torch.optim.SGD(model.parameters(), lr=0.01),
        max_duration=f"{steps}ba",
        device="cpu",
        callbacks=[MemoryMonitor(), SystemMetricsMonitor()] if tool else [],
        loggers=[FileLogger("composer.log", flush_interval=1)] if tool else [],
        progress_bar=False,
    ).fit()


ARMS: dict[str, Callable[[Training, int], None]] = {
    "bare": plain,
    "memlog": memlog,
    "memlog, to MLflow": lambda training, steps: memlog(training, steps, "mlflow"),
    "MLflow system metrics": mlflow_metrics,
    "W&B system metrics": wandb_metrics,
    "stormlog": stormlog,
    "TraceML": traceml,
    "Lightning": lightning,
    "Lightning, memlog": lambda training, steps: lightning(training, steps, "memlog"),
    "Lightning, DeviceStatsMonitor": lambda training, steps: lightning(training, steps, "monitor"),
    "Composer": composer,
    "Composer, its two monitors": lambda training, steps: composer(training, steps, "monitors"),
}


def main() -> None:
    arm, scenario, steps = sys.argv[1], sys.argv[2], int(sys.argv[3])
    training = Training(scenario)
    with contextlib.suppress(SystemExit):
        ARMS[arm](training, steps)
    peak = (
        resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
    )  # bytes; the kernel's own figure
    Path("measured.json").write_text(json.dumps({"begun": training.begun, "peak": peak}))


if __name__ == "__main__":
    main()

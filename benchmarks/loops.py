"""Training loops to compare. Each has a process, which runs a block of steps for each number on its stdin.

A loop's threads, helper process and heap would change the figures of other loops in the same process. Blocks
are interleaved, so a change of the machine's speed affects all loops.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

SETTLE_TIMEOUT = 300.0
QUIET = 1.5
"""Seconds without a new point after which a W&B run counts as up to date."""


class Step:
    """A training step that takes about a millisecond on one thread."""

    def __init__(self, batch: int) -> None:
        import torch

        torch.set_num_threads(1)
        torch.manual_seed(0)
        self.model = torch.nn.Sequential(
            torch.nn.Linear(128, 256), torch.nn.ReLU(), torch.nn.Linear(256, 128)
        )
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=0.01)
        self.inputs = torch.randn(batch, 128)

    def __call__(self) -> None:
        self.model(self.inputs).square().mean().backward()
        self.optimizer.step()
        self.optimizer.zero_grad()


class Bare:
    """A loop that does nothing but train."""

    def after_step(self, step: int) -> None:
        """Do the loop's own work at the end of a step."""

    def settle(self) -> None:
        """Wait until all background work of the block has ended."""


class Memlog(Bare):
    """A loop with memlog, otherwise unchanged."""

    def __init__(self, *backends: str) -> None:
        import memlog

        self.backends = backends
        self.session = memlog.init(list(backends))

    def settle(self) -> None:
        for backend in self.backends:
            if backend != "local":
                self._settle(backend)

    def _settle(self, backend: str) -> None:
        from memlog.journal import RunDirectory
        from memlog.journal.delivery_state import UploadState

        assert self.session.directory is not None
        run = RunDirectory(self.session.directory)
        trainer = f"trainer-{os.getpid()}"
        deadline = time.monotonic() + SETTLE_TIMEOUT
        sent, since = 0, time.monotonic()
        while time.monotonic() < deadline:
            state = UploadState.load(run, backend)
            if state.provisional != sent:  # W&B confirms no position before the run ends
                sent, since = state.provisional, time.monotonic()
            if sent and time.monotonic() - since >= QUIET:
                return
            progress = state.files.get(trainer)
            # Without the zero bytes of a segment that is allocated and not full.
            size = sum(len(path.read_bytes().rstrip(b"\0")) for path in run.path.glob("trainer-*"))
            if progress is not None and progress.sent.offset >= size:
                return
            time.sleep(0.05)
        raise TimeoutError(f"{backend} did not receive all points in {SETTLE_TIMEOUT:.0f} s")


class MlflowInTheLoop(Bare):
    """A loop that calls ``mlflow.log_metrics`` with the figures that memlog logs on a CPU."""

    def __init__(self, *, synchronous: bool) -> None:
        import mlflow

        self.mlflow = mlflow
        self.synchronous = synchronous
        mlflow.start_run()

    def after_step(self, step: int) -> None:
        import resource

        peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
        figures = {"rss_mib": peak, "rss_peak_mib": peak}
        self.mlflow.log_metrics(figures, step=step, synchronous=self.synchronous)

    def settle(self) -> None:
        if not self.synchronous:
            self.mlflow.flush_async_logging()


class WandbInTheLoop(Bare):
    """A loop that calls W&B's ``run.log``, offline, with the figures that memlog logs on a CPU."""

    def __init__(self) -> None:
        import wandb

        quiet = wandb.Settings(console="off", silent=True, x_disable_stats=True)
        self.run = wandb.init(project="benchmark", mode="offline", settings=quiet)

    def after_step(self, step: int) -> None:
        import resource

        peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
        self.run.log({"rss_mib": peak, "rss_peak_mib": peak}, step=step)


class WandbInProcess(WandbInTheLoop):
    """A loop that calls ``run.log``, while memlog writes to the same run from the same process."""

    def __init__(self) -> None:
        super().__init__()
        import memlog

        memlog.init("wandb")


LOOPS: dict[str, Callable[[], Bare]] = {
    "bare": Bare,
    "memlog, local": lambda: Memlog("local"),
    "memlog, MLflow": lambda: Memlog("mlflow"),
    "memlog, W&B": lambda: Memlog("wandb"),
    "memlog, MLflow and W&B": lambda: Memlog("mlflow", "wandb"),
    "mlflow.log_metrics": lambda: MlflowInTheLoop(synchronous=True),
    "mlflow.log_metrics, async": lambda: MlflowInTheLoop(synchronous=False),
    "wandb.log": WandbInTheLoop,
    "wandb.log, memlog in process": WandbInProcess,
}


class Worker:
    """A loop in its own process."""

    def __init__(self, name: str, batch: int) -> None:
        self.name = name
        self._directory = tempfile.TemporaryDirectory(prefix="memlog-benchmark-")
        clean = {
            k: v
            for k, v in os.environ.items()
            if not k.startswith(("MLFLOW_", "MEMLOG_", "WANDB_"))
        }
        root = str(Path(__file__).resolve().parents[1])
        self._process = subprocess.Popen(
            [sys.executable, "-m", "benchmarks.loops", name, str(batch)],
            cwd=self._directory.name,
            env={**clean, "PYTHONPATH": root, "WANDB_MODE": "offline"},
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )

    def block(self, steps: int) -> list[float]:
        """Run a block, wait until the loop has settled, and return each step's seconds."""
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._process.stdin.write(f"{steps}\n")
        self._process.stdin.flush()
        line = self._process.stdout.readline()
        if not line:
            raise RuntimeError(
                f"the process of loop {self.name!r} has ended: see its message above"
            )
        times: list[float] = json.loads(line)
        return times

    def close(self) -> None:
        """End the process and remove the files that it wrote."""
        assert self._process.stdin is not None
        self._process.stdin.close()
        self._process.wait(timeout=SETTLE_TIMEOUT)
        self._directory.cleanup()


def serve(name: str, batch: int) -> None:
    """Run a block of steps for each number on stdin, and print the steps' seconds (the worker process)."""
    loop = LOOPS[name]()
    train: Any = Step(batch)
    done = 0
    for line in sys.stdin:
        times = []
        for step in range(done, done + int(line)):
            begun = time.perf_counter()
            train()
            loop.after_step(step)
            times.append(time.perf_counter() - begun)
        done += len(times)
        loop.settle()
        print(json.dumps(times), flush=True)


if __name__ == "__main__":
    serve(sys.argv[1], int(sys.argv[2]))

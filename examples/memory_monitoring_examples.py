"""Six ways to monitor memory, each on a small network; without a GPU they print the host's figures.

``python examples/memory_monitoring_examples.py`` prints all of them. After ``memlog.init("mlflow")`` the same
figures go to MLflow, too.
"""

# PyTorch leaves Tensor.backward without types.
# mypy: allow-untyped-calls

from __future__ import annotations

import torch
from torch import Tensor, nn

from memlog.compat.memory_monitor import (
    BatchMemoryProfiler,
    EpochMemoryMonitor,
    MemoryMonitor,
    MemoryTracker,
    monitor_memory,
    track_memory,
)

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"


class Training:
    """Training of a network that learns to add its inputs."""

    def __init__(self) -> None:
        self.model = nn.Sequential(nn.Linear(64, 512), nn.ReLU(), nn.Linear(512, 1)).to(DEVICE)
        self.optimizer = torch.optim.Adam(self.model.parameters(), lr=1e-3)

    def batch(self) -> Tensor:
        """Return random inputs."""
        return torch.randn(256, 64, device=DEVICE)

    def loss(self, batch: Tensor) -> Tensor:
        """Return the mean squared error of the sums."""
        return nn.functional.mse_loss(self.model(batch)[:, 0], batch.sum(dim=1))

    def step(self) -> Tensor:
        """Make one training step; return its loss."""
        loss = self.loss(self.batch())
        loss.backward()
        self.optimizer.step()
        self.optimizer.zero_grad()
        return loss


def simple_measurements() -> None:
    MemoryMonitor.print_memory_usage("Before the model: ")
    training = Training()
    training.step()
    MemoryMonitor.print_memory_usage("After a step: ")
    print(
        f"CPU {MemoryMonitor.get_cpu_memory_mb():.0f} MB, GPU {MemoryMonitor.get_gpu_memory_mb():.0f} MB"
    )
    print(f"The summary has {', '.join(MemoryMonitor.get_memory_summary())}")


def several_checkpoints() -> None:
    tracker = MemoryTracker()
    tracker.record("initialization")
    training = Training()
    tracker.record("after_model")
    for _ in range(3):
        training.step()
    tracker.record("after_training")
    tracker.print_summary()


def context_managers() -> None:
    with track_memory("all of it"):
        with track_memory("building the model"):
            training = Training()
        with track_memory("three steps"):
            for _ in range(3):
                training.step()


def decorators() -> None:
    @monitor_memory("training epoch")
    def train_epoch(training: Training) -> None:
        for _ in range(3):
            training.step()

    train_epoch(Training())


def epoch_monitoring() -> None:
    training = Training()
    monitor = EpochMemoryMonitor(verbose_batches=2)
    for _ in range(2):
        monitor.on_epoch_start()
        for index in range(4):
            monitor.on_batch_end(index, training.step())
        monitor.on_epoch_end()


def batch_profiling() -> None:
    training = Training()
    profiler = BatchMemoryProfiler()
    for index in range(3):
        if index >= 2:
            profiler.disable()  # the first two batches are enough
        profiler.checkpoint("start")
        batch = training.batch()
        profiler.checkpoint("data_to_gpu")
        loss = training.loss(batch)
        profiler.checkpoint("forward")
        loss.backward()
        profiler.checkpoint("backward")
        training.optimizer.step()
        profiler.checkpoint("optimizer")
        profiler.print_summary()
        profiler.reset()


EXAMPLES = {
    "1. Simple measurements": simple_measurements,
    "2. Several checkpoints": several_checkpoints,
    "3. Context managers": context_managers,
    "4. Decorators": decorators,
    "5. Epoch monitoring": epoch_monitoring,
    "6. Batch profiling": batch_profiling,
}


def main() -> None:
    torch.manual_seed(0)
    for title, example in EXAMPLES.items():
        print(f"--- {title}")
        example()


if __name__ == "__main__":
    main()

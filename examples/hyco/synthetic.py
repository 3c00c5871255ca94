"""Training of a network that continues simulations."""

# PyTorch leaves Tensor.backward without types.
# mypy: allow-untyped-calls

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional
from torch.utils.checkpoint import checkpoint
from torch.utils.data import DataLoader

import memlog
from hyco.config import Config, SyntheticParams, UNetShape
from hyco.dataset import GroupedSampler, Rollouts
from hyco.simulations import simulation_files
from hyco.unet import UNet


class SyntheticTrainer:
    """Trainer with autoregressive rollouts: the network continues from its own predictions.

    Args:
        config: Configuration of the experiment.
        params: Configuration of the training.
        shape: Configuration of the network.
    """

    def __init__(self, config: Config, params: SyntheticParams, shape: UNetShape) -> None:
        self.params = params
        self.device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
        self.loader = _loader(config, params)
        channels = self.loader.dataset[0][0].shape[0]
        torch.manual_seed(0)
        self.model = UNet(channels, shape).to(self.device)
        self.optimizer = torch.optim.Adam(self.model.parameters(), lr=params.learning_rate)
        # float16 on a GPU needs its gradients scaled; bfloat16 on a CPU does not.
        half = params.use_amp and self.device.type == "cuda"
        self.precision = torch.float16 if half else torch.bfloat16
        self.scaler = torch.amp.GradScaler(self.device.type, enabled=half)
        if params.enable_memory_monitoring:
            self.memory_monitor = memlog.EpochMemoryMonitor(
                verbose_batches=params.memory_monitor_batches
            )

    def train(self) -> None:
        """Train for all epochs."""
        epochs = self.params.epochs
        for epoch in range(epochs):
            loss = self._train_epoch()
            print(f"Epoch {epoch + 1}/{epochs}: mean loss {loss:.6f}")

    def _train_epoch(self) -> float:
        if hasattr(self, "memory_monitor"):
            self.memory_monitor.on_epoch_start()
        total = torch.zeros((), device=self.device)
        for batch_idx, (frame, following) in enumerate(self.loader):
            loss = self._rollout_loss(frame.to(self.device), following.to(self.device))
            self._learn(loss, batch_idx)
            total += loss.detach()
            if hasattr(self, "memory_monitor"):
                self.memory_monitor.on_batch_end(batch_idx, loss)
        if hasattr(self, "memory_monitor"):
            self.memory_monitor.on_epoch_end()
        return total.item() / len(self.loader)

    def _rollout_loss(self, frame: Tensor, following: Tensor) -> Tensor:
        """Return the mean squared error over all predicted frames."""
        losses = []
        amp = self.params.use_amp
        with torch.autocast(self.device.type, dtype=self.precision, enabled=amp):
            for target in following.unbind(dim=1):
                frame = self._predict(frame)
                losses.append(functional.mse_loss(frame, target))
        return torch.stack(losses).mean()

    def _predict(self, frame: Tensor) -> Tensor:
        if self.params.use_checkpointing:
            recomputed: Tensor = checkpoint(self.model, frame, use_reentrant=False)
            return recomputed
        predicted: Tensor = self.model(frame)
        return predicted

    def _learn(self, loss: Tensor, batch_idx: int) -> None:
        """Add a batch's gradients; make an optimizer step after every few batches."""
        every, batches = self.params.gradient_accumulation_steps, len(self.loader)
        first = batch_idx - batch_idx % every
        together = min(every, batches - first)  # the last of an epoch may be fewer
        self.scaler.scale(loss / together).backward()
        if batch_idx + 1 == first + together:
            self.scaler.step(self.optimizer)
            self.scaler.update()
            self.optimizer.zero_grad()


def _loader(config: Config, params: SyntheticParams) -> DataLoader[tuple[Tensor, Tensor]]:
    files = simulation_files(config)
    chosen = [files[number] for number in params.train_sim] or files
    cached = config.data.max_cached_sims
    rollouts = Rollouts(chosen, params.num_predict_steps, cached, params.use_sliding_window)
    sampler = GroupedSampler(rollouts, cached, torch.Generator().manual_seed(0))
    pinned = config.data.pin_memory and torch.cuda.is_available()
    return DataLoader(rollouts, params.batch_size, sampler=sampler, pin_memory=pinned)

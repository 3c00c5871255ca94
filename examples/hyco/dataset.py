"""Data set of rollouts from simulations; a few simulations are kept in memory."""

from __future__ import annotations

import mmap
from collections import OrderedDict
from collections.abc import Iterator, Sequence
from pathlib import Path

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import Dataset, Sampler


class SimulationCache:
    """Cache that loads simulations on demand and keeps the most recently used ones.

    Args:
        files: One ``.npy`` file per simulation.
        capacity: Number of simulations to keep; ``None``: load all of them now.

    Attributes:
        hits: Requests for a simulation that was in the cache.
        loads: Simulations that were read from a file.
    """

    def __init__(self, files: Sequence[Path], capacity: int | None) -> None:
        self.hits = 0
        self.loads = 0
        self._files = files
        self._capacity = len(files) if capacity is None else max(capacity, 1)
        self._held: OrderedDict[int, Tensor] = OrderedDict()
        if capacity is None:
            for number in range(len(files)):
                self.get(number)

    def get(self, number: int) -> Tensor:
        """Return a simulation, ``[frame, channel, x, y]``. Copy parts to keep: a view keeps all in memory."""
        held = self._held.get(number)
        if held is not None:
            self.hits += 1
            self._held.move_to_end(number)
            return held
        if len(self._held) >= self._capacity:
            self._held.popitem(last=False)
        self.loads += 1
        loaded = self._held[number] = load_simulation(self._files[number])
        return loaded

    @property
    def held_bytes(self) -> int:
        """Bytes of the simulations in the cache."""
        return sum(simulation.nbytes for simulation in self._held.values())


class Rollouts(Dataset[tuple[Tensor, Tensor]]):
    """Pairs of a frame and the frames that follow it.

    Args:
        files: One file per simulation.
        steps: Number of frames that follow the first.
        max_cached_sims: Capacity of the `SimulationCache`.
        sliding_window: ``True``: a rollout begins at every frame; ``False``: only at a simulation's first
            frame.
    """

    def __init__(
        self,
        files: Sequence[Path],
        steps: int,
        max_cached_sims: int | None,
        sliding_window: bool = True,
    ) -> None:
        self.cache = SimulationCache(files, max_cached_sims)
        self._simulations = len(files)
        self._steps = steps
        frames = np.load(files[0], mmap_mode="r").shape[0]
        self.windows = frames - steps if sliding_window else 1

    def __len__(self) -> int:
        return self._simulations * self.windows

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        number, first = divmod(index, self.windows)
        frames = self.cache.get(number)[first : first + self._steps + 1]
        window = (
            frames.clone()
        )  # a view would keep the whole simulation alive after it leaves the cache
        return window[0], window[1:]


class GroupedSampler(Sampler[int]):
    """Sampler that shuffles simulations, and windows within groups as large as the cache.

    If all windows were shuffled together, a window's simulation would rarely be in the cache (one time in
    four with 5 of 20 cached). With groups every simulation is loaded once per epoch.

    Args:
        rollouts: Data set to sample from.
        group: Simulations in a group; ``None``: all in one.
        generator: Generator of random numbers.
    """

    def __init__(self, rollouts: Rollouts, group: int | None, generator: torch.Generator) -> None:
        self._length = len(rollouts)
        self._windows = rollouts.windows
        self._group = group
        self._generator = generator

    def __len__(self) -> int:
        return self._length

    def __iter__(self) -> Iterator[int]:
        simulations = self._length // self._windows
        order = torch.randperm(simulations, generator=self._generator)
        for group in torch.split(order, self._group or simulations):
            windows = (group[:, None] * self._windows + torch.arange(self._windows)).flatten()
            shuffled = torch.randperm(len(windows), generator=self._generator)
            yield from windows[shuffled].tolist()


def load_simulation(file: Path) -> Tensor:
    """Read a file into its own memory pages, which return to the system as soon as the tensor is deleted.

    Memory from the C library's heap often does not return: glibc keeps freed memory for later allocations.
    """
    stored = np.load(file, mmap_mode="r")
    pages = mmap.mmap(-1, stored.nbytes)
    frames = np.frombuffer(pages, dtype=stored.dtype).reshape(stored.shape)
    frames[...] = stored
    return torch.from_numpy(frames)

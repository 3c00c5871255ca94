"""Rollouts cut from simulations, of which a few are held in memory."""

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
    """Loads simulations when they are asked for, and keeps those that were used last.

    Args:
        files: One ``.npy`` file a simulation.
        capacity: How many are kept; ``None``: all of them, loaded at once.

    Attributes:
        hits: How often a simulation was there already.
        loads: How often one was read.
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
        """A simulation, ``[frame, channel, x, y]``. What outlives the next call is to be a copy of it."""
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
        """What is kept now."""
        return sum(simulation.nbytes for simulation in self._held.values())


class Rollouts(Dataset[tuple[Tensor, Tensor]]):
    """Pairs of a frame and the frames that follow it.

    Args:
        files: One file a simulation.
        steps: How many frames follow.
        max_cached_sims: See `SimulationCache`.
        sliding_window: Every frame begins a rollout; else the first of a simulation alone.
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
        window = frames.clone()  # a view would hold the whole simulation after it left the cache
        return window[0], window[1:]


class GroupedSampler(Sampler[int]):
    """Shuffles simulations, and windows among as many simulations as the cache holds.

    Shuffled freely, a window's simulation is rarely in the cache (one in four times with 5 of 20 held);
    like this every simulation is loaded once an epoch.

    Args:
        rollouts: What to sample from.
        group: Simulations that are drawn from together.
        generator: Of random numbers.
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
    """Reads a file into pages of its own, which the system has back as soon as the tensor is gone.

    From the C library's heap it would often not: glibc keeps what was freed for the next allocation.
    """
    stored = np.load(file, mmap_mode="r")
    pages = mmap.mmap(-1, stored.nbytes)
    frames = np.frombuffer(pages, dtype=stored.dtype).reshape(stored.shape)
    frames[...] = stored
    return torch.from_numpy(frames)

"""Allocations and frees, one by one: those of torch's CUDA allocator, and those of an estimate."""

from __future__ import annotations

import gc
from collections.abc import Callable

import torch

from memlog.estimates.caching_allocator import ROUNDING, CachingAllocator
from memlog.estimates.estimate import Estimate

SIGNS = {"alloc": 1, "free_requested": -1}


class Recording(CachingAllocator):
    """Allocator that lists the bytes that it allocates (positive) and frees (negative)."""

    def __init__(self) -> None:
        super().__init__()
        self.events: list[int] = []
        self._sizes: dict[int, int] = {}

    def allocate(self, key: int, size: int, stream: int = 0) -> None:
        self._sizes[key] = size
        self.events.append(rounded(size))
        super().allocate(key, size, stream)

    def free(self, key: int) -> None:
        self.events.append(-rounded(self._sizes[key]))
        super().free(key)


def rounded(size: int) -> int:
    return -(-size // ROUNDING) * ROUNDING


def of_an_estimate(found: Estimate) -> list[int]:
    """Return the bytes of the set-up and of the first step."""
    assert found._replay is not None
    recording = Recording()
    next(found._replay.steps(recording))
    return recording.events


def of_the_allocator(run: Callable[[], object]) -> list[int]:
    """Return the bytes that a program allocates and frees on the current CUDA device, until it returns."""
    torch._C._cuda_clearCublasWorkspaces()
    gc.collect()
    torch.cuda.memory._record_memory_history("all", context=None, clear_history=True)
    try:
        kept = run()
        history = torch.cuda.memory._snapshot()["device_traces"][0]
    finally:
        torch.cuda.memory._record_memory_history(None)
    del kept
    return [
        SIGNS[event["action"]] * rounded(event["size"])
        for event in history
        if event["action"] in SIGNS
    ]


def with_sorted_end(events: list[int]) -> list[int]:
    """Return the events, with the frees after the last allocation in order of size.

    In which order the tensors of a graph are freed with it changes no peak.
    """
    last = max((at for at, size in enumerate(events) if size > 0), default=-1)
    return events[: last + 1] + sorted(events[last + 1 :])

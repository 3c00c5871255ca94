"""What the CPU's allocator says that it did: the truth that traces are held against."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch


class Truth(NamedTuple):
    """Over the bytes at the beginning."""

    peak: int
    end: int


class AllocatorTruth:
    """Records every allocation and free that torch's CPU allocator reports to ``torch.profiler``."""

    def __init__(self) -> None:
        self._profile: Any = torch.profiler.profile(
            activities=[torch.profiler.ProfilerActivity.CPU], profile_memory=True
        )

    def __enter__(self) -> AllocatorTruth:  # noqa: PYI034 - Python 3.10 has no Self
        self._profile.__enter__()
        return self

    def __exit__(self, *error: object) -> None:
        self._profile.__exit__(*error)

    def result(self) -> Truth:
        events = [
            event
            for event in self._profile.profiler.kineto_results.events()
            if event.name() == "[memory]"
        ]
        assert events
        level = peak = 0
        for event in sorted(events, key=lambda event: event.start_ns()):
            level += event.nbytes()
            peak = max(peak, level)
        return Truth(peak, level)

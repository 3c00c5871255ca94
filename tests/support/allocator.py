"""The CPU allocator's own list of allocations, with which tests compare traces."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any, NamedTuple

import torch
from torch._C._profiler import _EventType


class Truth(NamedTuple):
    """Bytes above the bytes in use at the beginning of the measurement."""

    peak: int
    end: int


class AllocatorTruth:
    """Recorder of every allocation and every free that torch's CPU allocator reports to ``torch.profiler``.

    A free counts only if its allocation was recorded. torch remembers the size of the block at each address,
    also from earlier profiles and from operations that memlog has measured, and also after the block is
    freed. If the garbage collector frees memory from before the profile, torch reports a remembered size.
    """

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
        tree = self._profile.profiler.kineto_results.experimental_event_tree()
        events = [event for event in _flat(tree) if event.tag == _EventType.Allocation]
        assert events
        held: dict[int, int] = {}
        level = peak = 0
        for event in sorted(events, key=lambda event: event.start_time_ns):
            block = event.extra_fields
            if block.alloc_size > 0:
                held[block.ptr] = block.alloc_size
                level += block.alloc_size
            else:
                level -= held.pop(block.ptr, 0)
            peak = max(peak, level)
        return Truth(peak, level)


def _flat(events: Iterable[Any]) -> Iterator[Any]:
    for event in events:
        yield event
        yield from _flat(event.children)

"""Readings of memory in events, and the types of their fields."""

from __future__ import annotations

import time
from math import prod
from typing import Annotated, Literal, TypeAlias

import msgspec

Int: TypeAlias = Annotated[int, msgspec.Meta(ge=-(2**63), le=2**63 - 1)]
"""Whole number that trackers and databases can store. A journal line with a larger number is damaged."""

Status: TypeAlias = Literal["finished", "failed", "killed"]
"""Outcome of a run."""

PeakSource: TypeAlias = Literal["exact", "watermark", "sampled"]
"""Source of a peak.

The system keeps a mark: the highest value since the process began, or since other code reset the mark.

- ``exact``: the mark rose in the event's own period, such as its step. So the mark is the period's peak.
- ``watermark``: the mark did not rise in this period. It is only an upper bound of the period's peak.
- ``sampled``: other code reset the mark in this period. The peak is the highest known value: a lower
  bound."""


def now_us() -> int:
    """Return the Unix time in whole microseconds."""
    return time.time_ns() // 1000


class DeviceReading(msgspec.Struct, frozen=True, array_like=True):
    """Reading of one accelerator's allocator, in bytes. A figure that PyTorch does not report is ``None``."""

    name: str
    """Device type and index as in metric names: ``cuda0``, ``mps0``."""
    allocated: Int | None
    """Bytes that tensors hold."""
    reserved: Int | None
    """Bytes that the caching allocator holds."""
    peak: Int | None
    """Highest ``allocated``. ``peak_source`` tells whether it was reached in the event's own period."""
    peak_source: PeakSource | None
    inactive_split: Int | None
    """Free bytes in those segments of the allocator that are partly in use. ``None`` also with expandable
    segments, for which the allocator does not count these bytes."""
    private_pools: Int | None = None
    """Part of ``reserved``: bytes in private pools, such as those of CUDA graphs. Other tensors can't use
    them."""
    retries: Int | None = None
    """Number of times that the allocator got no memory from the device, freed its cache and tried again,
    since the process began."""
    ooms: Int | None = None
    """Number of failed allocations since the process began. The program can have caught the errors."""


class ChildReading(msgspec.Struct, frozen=True, array_like=True):
    """Reading of one descendant of the training process."""

    role: str
    """Role of the process: ``DataLoader worker 3`` (numbered by start, from 0), or the program's name."""
    pid: Int
    started: Int
    """Start of the process, Unix time in microseconds. Together with ``pid`` it identifies the process."""
    anon: Int | None
    """Resident bytes that are neither pages of mapped files nor shared memory."""
    own: Int | None = None
    """Bytes of pages that the process has written and shares with no other process, not even its parent."""


class DeviceUse(msgspec.Struct, frozen=True, array_like=True):
    """Memory in use on a whole device, in bytes."""

    name: str
    """Device type and index, as in `DeviceReading`."""
    used: Int
    """Bytes in use by all processes and by the driver."""
    other: Int | None = None
    """``used`` minus the bytes that the trainer's caching allocator holds. These bytes belong to other
    processes, CUDA's own context and the libraries' buffers. ``None`` if the allocator's size changed in the
    last step."""
    other_processes: Int | None = None
    """Part of ``used`` that belongs to other processes than the trainer and its descendants, by the driver.
    ``None`` if that is unknown, as in a container."""


class TensorInput(msgspec.Struct, frozen=True, array_like=True):
    """Tensor that a step got as an input."""

    name: str
    """Expression in the program, such as ``tokens`` or ``batch["input_ids"]``."""
    shape: tuple[Int, ...]
    dtype: str
    """Type of the tensor's elements, such as ``int64``."""

    @property
    def elements(self) -> int:
        """Number of the tensor's elements."""
        return prod(self.shape)

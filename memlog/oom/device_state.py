"""State of a CUDA device at a failed allocation: what is free, who holds the rest, and in what pieces.

The functions run in torch's observer of failed allocations. They allocate no memory on the device.
"""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from memlog._internal.diagnostics import Diagnostics
from memlog._internal.distributed import rank_position
from memlog.events import DeviceProcess, DeviceState
from memlog.probes.cuda_allocator import (
    allocator_settings,
    has_expandable_segments,
    segments_without_history,
)
from memlog.probes.nvml import Nvml, ProcessUse

_MOST_PROCESSES = 32
"""Maximum number of other processes in a state."""
SMALL_SEGMENT = 2 * 1024**2
"""Bytes of a segment of small blocks (c10/core/AllocatorConfig.h). Other segments are larger, and a request
of at most 1 MiB asks the driver for this size."""
_SHARED_POOL = (0, 0)
"""Identity of the pool in which the allocator holds all memory that is in no private pool."""
_FRACTION = "the part of the device that this process may use (`torch.cuda.set_per_process_memory_fraction`)"


_SHARED = "the host's memory, which the device shares"


class Limit(NamedTuple):
    """The tightest limit of a process on a device, in bytes."""

    size: int
    free: int
    """Bytes that the process could still take under this limit."""
    name: str


def tightest_limit(
    total: int, free: int, allowed: int, reserved: int | None, *, shared: bool = False
) -> Limit:
    """Return the limit that leaves the process the fewest bytes.

    Args:
        total: Bytes of the device.
        free: Free bytes of the device.
        allowed: Bytes of the device that torch allows the process; ``total`` if there is no such limit.
        reserved: Bytes that the process's allocator holds; ``None``: unknown.
        shared: True if the device uses the host's memory.
    """
    if allowed < total and reserved is not None and allowed - reserved < free:
        return Limit(allowed, max(allowed - reserved, 0), _FRACTION)
    return Limit(total, free, _SHARED if shared else "the device's memory")


def device_state(
    torch: Any,
    device: int,
    total: int,
    free: int,
    reserved: int | None,
    nvml: Nvml,
    diagnostics: Diagnostics,
    *,
    requested: int,
    allowed: int,
    shared: bool,
) -> DeviceState:
    """Return the state of a CUDA device. Figures that can't be read are ``None``.

    ``total`` and ``free`` are bytes of the device, and ``reserved`` those that this process's allocator
    holds (``None``: unknown). ``requested`` is the size of the failed request to the driver, on the current
    stream. ``allowed`` and ``shared``: see `tightest_limit`.
    """
    others: int | None = None
    processes: tuple[DeviceProcess, ...] = ()
    pools = _Pools()
    with diagnostics.contained("reading which processes use the device"):
        uuid = getattr(torch.cuda.get_device_properties(device), "uuid", None)
        found = [] if uuid is None else nvml.processes(str(uuid))
        others, processes = _other_processes(found)
    with diagnostics.contained("reading the allocator's segments"):
        stream = torch.cuda.current_stream(device).cuda_stream
        pools = _pools(segments_without_history(torch), device, stream, requested)
    return DeviceState(
        free=free,
        outside=None if reserved is None or shared else max(total - free - reserved, 0),
        others=others,
        processes=processes,
        in_pools=pools.private,
        unused_in_pools=pools.unused_private,
        of_graphs=pools.of_graphs,
        largest_unused=pools.largest_unused,
        unused_of_streams=pools.unused_of_streams,
        allowed=allowed if allowed < total else None,
        expandable=has_expandable_segments(allocator_settings(torch)),
        shares_host=shared,
    )


def _other_processes(found: Sequence[ProcessUse]) -> tuple[int | None, tuple[DeviceProcess, ...]]:
    """Return the bytes that other processes use, and the largest of these processes.

    The bytes are ``None`` if they are unknown. In a container, the driver may list processes by ids that
    belong to other processes here. This process's own id is then missing, and no process is named.
    """
    own = os.getpid()
    others = sorted((each for each in found if each.pid != own), key=lambda each: -(each.used or 0))
    if len(others) == len(found):
        return None, ()
    sizes = [each.used for each in others if each.used is not None]
    known = sum(sizes) if len(sizes) == len(others) else None
    return known, tuple(_named(each, own) for each in others[:_MOST_PROCESSES])


def _named(process: ProcessUse, own: int) -> DeviceProcess:
    import psutil  # noqa: PLC0415 - takes 10 ms

    try:
        found = psutil.Process(process.pid)
        is_child = any(parent.pid == own for parent in found.parents())
        is_rank = rank_position() is not None and found.ppid() == os.getppid()
        return DeviceProcess(process.pid, process.used, found.name(), is_child, is_rank)
    except psutil.Error:
        return DeviceProcess(process.pid, process.used)


class _Pools(NamedTuple):
    """Bytes in the allocator's pools; ``None``: unknown."""

    private: int | None = None
    unused_private: int | None = None
    of_graphs: bool = False
    largest_unused: int | None = None
    unused_of_streams: int | None = None


def _pools(
    segments: Sequence[Mapping[str, Any]] | None, device: int, stream: int, requested: int
) -> _Pools:
    if segments is None:
        return _Pools()
    private: list[Mapping[str, Any]] = []
    shared: list[Mapping[str, Any]] = []
    for each in segments:
        if each["device"] == device:
            pool = tuple(each.get("segment_pool_id", _SHARED_POOL))
            (shared if pool == _SHARED_POOL else private).append(each)
    kind = "small" if requested <= SMALL_SEGMENT else "large"
    usable = (each for each in shared if each["stream"] == stream and each["segment_type"] == kind)
    unused = (
        block["size"] for each in usable for block in each["blocks"] if block["state"] == "inactive"
    )
    return _Pools(
        sum(each["total_size"] for each in private),
        sum(each["total_size"] - each["active_size"] for each in private),
        # torch numbers the pools of captures in the first place of the identity, and those that the program
        # makes in the second.
        bool(private) and all(each["segment_pool_id"][0] for each in private),
        max(unused, default=0),
        sum(
            each["total_size"] - each["active_size"] for each in shared if each["stream"] != stream
        ),
    )

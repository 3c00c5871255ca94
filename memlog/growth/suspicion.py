"""Description of a growth that was noticed."""

from __future__ import annotations

from typing import NamedTuple


class Suspicion(NamedTuple):
    """Growth of one series; sizes are bytes, rates are bytes per step."""

    series: str
    """Name of the series: ``host.anon`` (memory of the training process without mapped files and shared
    memory), ``host.free_lists`` (unused memory of the C library's allocator), ``shared_memory``,
    ``children.shared_memory``, ``cuda0.allocated``, ``cuda0.fragmented``, ``cuda0.private_pools``,
    ``child:DataLoader worker 3`` or ``processes:python`` (all child processes of one kind)."""
    since_step: int
    """First step of the growth."""
    rate: float
    rate_low: float
    rate_high: float
    """Upper end of the rate's 95 % interval. ``rate_low`` is the lower end."""
    level: int
    """Bytes of the series at ``step``."""
    limit: int | None
    """Bytes of the series when memory is full: ``level`` plus the free bytes. ``None`` if unknown."""
    step: int
    """Newest step when this object was made."""
    forecast: tuple[int, int] | None = None
    """Earliest and latest step at which memory will be full; ``None`` if unknown or too uncertain."""
    processes: int | None = None
    """Number of processes that were started during the growth and are still alive. ``None`` if such processes
    are not the cause of the growth."""
    others: int = 0
    """Number of other child processes of the same kind as the process in ``series``. ``rate`` and ``level``
    include the growth of these processes."""
    allocator: str | None = None
    """Settings of the device's allocator, as in `memlog.events.Device`; ``None`` if unknown or not about a
    device."""

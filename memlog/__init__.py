"""memlog: records the memory use of your training in the tracker that you already use.

::

    import memlog

    memlog.init("mlflow")
    ...                     # an unchanged PyTorch loop: memlog detects the optimizer steps
    memlog.finish()         # memlog also calls this at exit
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from memlog._version import __version__
from memlog.errors import (
    ConfigurationError,
    DeliveryError,
    JournalError,
    MemlogError,
    MissingExtraError,
    RunNotFoundError,
    SnapshotError,
    TrackerRejectedError,
    TrackerUnavailableError,
    UnknownBackendError,
    UnsafeSnapshotError,
    UnwritableDirectoryError,
)
from memlog.monitors import (
    BatchMemoryProfiler,
    EpochMemoryMonitor,
    MemoryMonitor,
    MemoryTracker,
    monitor_memory,
    track_iterations,
    track_memory,
    watch_loss,
)
from memlog.session.session import Session, finish, init, snapshot

if TYPE_CHECKING:
    from memlog.tracer import LayerMemoryStats, MemoryEvent, MemoryTracer

__all__ = [
    "BatchMemoryProfiler",
    "ConfigurationError",
    "DeliveryError",
    "EpochMemoryMonitor",
    "JournalError",
    "LayerMemoryStats",
    "MemlogError",
    "MemoryEvent",
    "MemoryMonitor",
    "MemoryTracer",
    "MemoryTracker",
    "MissingExtraError",
    "RunNotFoundError",
    "Session",
    "SnapshotError",
    "TrackerRejectedError",
    "TrackerUnavailableError",
    "UnknownBackendError",
    "UnsafeSnapshotError",
    "UnwritableDirectoryError",
    "__version__",
    "finish",
    "init",
    "monitor_memory",
    "snapshot",
    "track_iterations",
    "track_memory",
    "watch_loss",
]


def __getattr__(name: str) -> Any:
    """Load the layer tracer on first use, because not every training script traces."""
    if name not in ("LayerMemoryStats", "MemoryEvent", "MemoryTracer"):
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from memlog import tracer  # noqa: PLC0415 - see the docstring

    found = getattr(tracer, name)
    globals()[name] = found
    return found


def __dir__() -> list[str]:
    """Return the public names only."""
    return sorted(__all__)
